"""Many callers of one engine: threads that submit, read, and cut answers off."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch
from equality import seeded

from treespec.errors import Busy


def random_prompts(count, longest=40, seed=3):
    generator = seeded(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def said(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def interrupted(function, call):
    """The function, whose call of that number ends in a KeyboardInterrupt after its work."""
    calls = itertools.count(1)

    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        if next(calls) == call:
            raise KeyboardInterrupt
        return result

    return run


def held():
    """Threads of Python, and descriptors, of this process."""
    return threading.active_count(), psutil.Process().num_fds()


def soak(engine, prompts, clients, options, cut=0.1, seed=0):
    """What each of `clients` threads read of its share of the prompts, a part of which it cuts off at random.

    options: of the request with a number. Returns (prompt number, tokens, whether it was cut off) for each.
    """

    def submitted(number, prompt):
        while True:
            try:
                return engine.submit(prompt, **options(number))
            except Busy:
                threading.Event().wait(0.002)

    def client(own):
        coins = random.Random(seed + own)
        answers = []
        for number in range(own, len(prompts), clients):
            answer = submitted(number, prompts[number])
            pieces = []
            left = coins.randrange(1, 8) if coins.random() < cut else None  # pieces until it is cut off
            for piece in answer:
                pieces.append(piece)
                if left is not None and len(pieces) >= left:
                    answer.cancel()
                    break
            answers.append((number, said(pieces), answer.cancelled))
        return answers

    with ThreadPoolExecutor(clients) as pool:
        shares = pool.map(client, range(clients))
        return [answer for share in shares for answer in share]
