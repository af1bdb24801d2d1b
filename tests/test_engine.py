"""One engine, many callers: each gets its own answer, whoever else comes, leaves or fails; prefill in chunks."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from commands import complains, count_held
from models import CONFIGS, join_tokens, random_head, random_model, random_prompts, target

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.errors import Busy
from treespec.kernels import ops as kernels
from treespec.model import cuda_graphs as graphs
from treespec.model.target import Target


def soak(engine, prompts, clients, options, cut=0.1, seed=0):
    """Let `clients` threads share the prompts; each reads its answers, and breaks off some of them at random.

    options: (number of a prompt) -> the options of its request. cut: the share that is broken off.
    Returns (number of the prompt, tokens that were read, whether they were broken off) for each prompt.
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
            answers.append((number, join_tokens(pieces), answer.cancelled))
        return answers

    with ThreadPoolExecutor(clients) as pool:
        shares = pool.map(client, range(clients))
        return [answer for share in shares for answer in share]


def test_between_two_chunks_of_long_prompts_the_batch_takes_a_step(spec):
    """The prompts take turns, one leaves amid its own, and every answer is its own alone."""
    decoder, (short, *long) = spec.new().decoder, [[9, 4, 30], [5, 6] * 40, [8, 11, 3] * 30, [7, 13] * 30]
    limits = (60, 9, 9, 9)
    texts = [spec.request(p, max_new_tokens=n) for p, n in zip((short, *long), limits, strict=True)]
    answers = {text: [] for text in texts}
    entering = texts[:1]
    steps = 0
    decoder.stretch = 7
    with torch.inference_mode():
        while entering or not all(text.ended for text in texts):
            pieces = decoder.run_step(entering)
            assert texts[0].ended or any(text is texts[0] for text, _ in pieces)
            for text, piece in pieces:
                answers[text].append(piece)
            entering = ([], texts[1:])[steps == 0]
            steps = steps + 1
            if steps == 9:
                assert all(0 < len(text.committed) <= 28 for text in texts[1:])
                texts[3].cancelled = True
    for text, prompt, most in list(zip(texts, (short, *long), limits, strict=True))[:3]:
        assert join_tokens(answers[text]) == alone(spec, prompt, max_new_tokens=most)
    assert answers[texts[3]] == []


def test_a_prompt_finds_its_cached_prefix_though_others_asked_between(spec):
    """Three conversations of several turns, all of whose callers ask at once, and a prompt asked again."""
    turns = [[start, *[3 + start, 50, 20 + start] * 6] for start in (5, 9, 12)]
    with Engine(spec, batch=3) as engine:
        for turn in range(3):
            answers = [engine.submit(prompt, **NEW) for prompt in turns]
            for number, answer in enumerate(answers):
                output = answer.result()
                assert output.token_ids == alone(spec, turns[number], **NEW)
                # All but three tokens that follow, the latest one, and the one before it.
                assert output.stats.cached_tokens >= (len(turns[number]) - 5 if turn else 0)
                turns[number] = [*turns[number], *output.token_ids, 30, 31, 32]
        asked = turns[1][: -NEW["max_new_tokens"] - 3]
        for memory, cached in (("another's", 0), ("", len(asked) - 2)):
            again = engine.submit(asked, **NEW, memory=memory)
            assert again.result().token_ids == alone(spec, asked, **NEW)
            assert again.stats.cached_tokens == cached


@pytest.mark.parametrize(
    "name, stretch",
    [
        *(("llama", None), ("gemma3", 60), ("gpt2", None)),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("llama", 60), ("gemma3", None), ("gpt2", 60))),
    ],
)
def test_new_prompts_go_through_a_gpu_together(monkeypatch, name, stretch):
    """Of eight prompts one continues an earlier text, and one is a single token. All have their texts alone."""
    monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    target = Target(random_model(CONFIGS[name]()))
    target.eos = frozenset()
    new = 7
    spec = Spec(target, random_head(target), "2x2", "topk")
    before = [*range(3, 30)]
    prompts = [[7 + n, 5, *range(9 + n, 9 + 3 * n)] for n in range(6)] + [[11]]
    prompts.append([*before, *spec.generate(before, max_new_tokens=new).token_ids, 8])
    wanted = [spec.generate(one, max_new_tokens=new).token_ids for one in prompts]

    spec = spec.new()
    spec.decoder.batch.prefix_cache.limit = 2
    spec.decoder.stretch = stretch
    spec.generate(before, max_new_tokens=new)  # what the last one goes on from
    monkeypatch.setattr(graphs, "Recorder", lambda: None)
    monkeypatch.setattr(graphs, "RECORD_AFTER_CALLS", 10_000)  # none is recorded
    target.tree_decoder.graphs = graphs.Graphs(name)
    forwards = []
    prefill = target.prefill
    monkeypatch.setattr(target, "prefill", lambda *args: forwards.append(len(args[1])) or prefill(*args))
    texts = [spec.request(one, max_new_tokens=new) for one in prompts]
    found = {text: [] for text in texts}
    for text, piece in spec.decoder.run(texts, batch=8):
        found[text] += piece.token_ids
    assert [*found.values()] == wanted
    assert sorted(forwards) == ([1, 6] if stretch is None else [1, 1, 5])


NEW = {"max_new_tokens": 12}
SPECS = {
    "head": lambda: Spec(target("llama"), random_head(target("llama")), "2x2"),
    "baseline": lambda: Spec(target("llama"), None),
}


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return SPECS[request.param]()


@pytest.fixture(scope="module")
def head():
    return SPECS["head"]()


@pytest.fixture
def around(monkeypatch):
    """Replaces a method of `Target` by a function of the original one and its arguments."""

    def replace(name, function):
        original = getattr(Target, name)
        monkeypatch.setattr(Target, name, lambda self, *given: function(lambda: original(self, *given), *given))

    return replace


def alone(spec, prompt, **options):
    return spec.new().generate(prompt, **options).token_ids


def held_up(engine, prompt, **options):
    """A request that runs, and an event that lets the engine's thread go on after its first piece."""
    begun = Event()
    go = Event()

    def on_piece(piece):
        begun.set()
        assert go.wait(60)

    answer = engine.submit(prompt, on_piece=on_piece, **options)
    assert begun.wait(60)
    return answer, go


def mixed(number):
    """Options of a request: its own temperature, limits and seed."""
    own = {"temperature": (0.0, 1.0, 0.7)[number % 3], "top_k": number % 4}
    return own | {"max_new_tokens": 6 + number, "seed": number}


def test_each_of_many_callers_gets_the_answer_of_its_request_alone(spec):
    prompts = random_prompts(9)
    with Engine(spec, batch=4) as engine:
        found = soak(engine, prompts, 5, mixed, cut=0.0)
        beside = spec.generate(prompts[0], **mixed(0))  # the Spec stays free
    wanted = [(number, alone(spec, prompt, **mixed(number)), False) for number, prompt in enumerate(prompts)]
    assert sorted(found) == wanted
    assert beside.token_ids == wanted[0][1]


def test_a_cancelled_request_leaves_within_a_cycle_and_the_others_go_on(spec):
    prompts = random_prompts(3)
    with Engine(spec, batch=2) as engine:
        first, go = held_up(engine, prompts[0], max_new_tokens=80)
        second, third = (engine.submit(prompt, **NEW) for prompt in prompts[1:])
        first.cancel()
        third.cancel()
        assert engine.waiting == 2
        go.set()
        assert list(third) == []
        assert join_tokens(second) == alone(spec, prompts[1], **NEW)
        first.result()
        assert first.error is None
        assert len(first.output.token_ids) < 10
        assert first.output.token_ids == alone(spec, prompts[0], max_new_tokens=80)[: first.stats.new_tokens]
        assert (engine.running, engine.waiting) == (0, 0)


def test_a_full_queue_is_busy_until_a_request_has_ended(spec):
    (prompt,) = random_prompts(1)
    with Engine(spec, batch=1, queue=1) as engine:
        first, go = held_up(engine, prompt, **NEW)
        second = engine.submit(prompt, **NEW)
        with pytest.raises(Busy, match="try again later"):
            engine.submit(prompt)
        assert (engine.running, engine.waiting) == (1, 1)
        go.set()
        third = first.result() and second.result() and engine.submit(prompt, **NEW)
        assert first.output.token_ids == second.output.token_ids == third.result().token_ids


def test_samples_of_a_prompt_share_its_prefill_and_enter_together(spec, around):
    prompt = random_prompts(1)[0]
    prefilled = []

    def counted(prefill, cache, tokens, *_):
        prefilled.append(tokens.shape[1])
        return prefill()

    wanted = [alone(spec, prompt, temperature=1.0, seed=seed, **NEW) for seed in (5, 6, 7)]
    around("prefill", counted)
    with Engine(spec, batch=2, queue=1) as engine:
        del prefilled[:]
        answers = engine.submit_n(prompt, 3, seed=5, temperature=1.0, **NEW)
        assert [answer.result().token_ids for answer in answers] == wanted
        assert sum(prefilled) <= len(prompt)  # the last may take the row of another, but for one token
        with pytest.raises(Busy, match="at most 3 may"):
            engine.submit_n(prompt, 4)
        assert engine.waiting == 0


def test_memory_bounds_how_many_run_at_a_time(head, around):
    """Each row counts as long as the longest: beside one of 40 columns, 100 columns hold one more of any length."""
    together = []

    def counted(forward, cache, trees, *_):
        together.append(len(trees))
        return forward()

    around("forward_trees", counted)
    with Engine(head, batch=8, columns=100) as engine:
        _, go = held_up(engine, [5] * 28, **NEW)
        answers = [engine.submit([5] * length, **NEW) for length in (3, 28, 5, 4)]
        go.set()
        assert all(answer.result().token_ids for answer in answers)
        with complains(r"take 101 positions, .* holds 100"):
            engine.submit([5] * 50, max_new_tokens=51)
    assert max(together) == 2


def test_what_fails_for_one_request_ends_that_one_alone(head, around):
    """Its prefill, its processor, its caller."""
    prompts = random_prompts(4)
    bad = [7, 7, 7, 7]

    def without_room(prefill, cache, tokens, *_):
        if tokens[0, :3].tolist() == bad[:3]:
            raise MemoryError("no room")
        return prefill()

    def broken(piece):
        raise LookupError("nobody listens")

    def unfinished(input_ids, scores):
        if input_ids.shape[1] > len(prompts[1]) + 2:
            raise ArithmeticError("a processor broke")
        return scores

    around("prefill", without_room)
    with Engine(head, batch=8) as engine:
        first, go = held_up(engine, prompts[0], **NEW)
        failing = {
            LookupError: engine.submit(prompts[1], on_piece=broken, **NEW),
            MemoryError: engine.submit(bad, **NEW),
            ArithmeticError: engine.submit(prompts[1], logits_processor=unfinished, **NEW),
        }
        others = [engine.submit(prompt, **NEW) for prompt in prompts[2:]]
        go.set()
        for error, answer in failing.items():
            for read in (list, type(answer).result):  # and again, never an end
                with pytest.raises(error):
                    read(answer)
        for prompt, answer in zip((prompts[0], *prompts[2:]), (first, *others), strict=True):
            assert answer.result().token_ids == alone(head, prompt, **NEW)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_whose_logits_are_no_numbers_ends_alone(spec, around, temperature):
    prompts = random_prompts(3)
    options = {"temperature": temperature, "seed": 4} | NEW

    def broken(forward, cache, trees, *_):
        outs = forward()
        if len(outs) == 3:
            outs[1].logits.fill_(float("nan"))
        return outs

    wanted = [alone(spec, prompt, **options) for prompt in prompts]
    around("forward_trees", broken)
    with Engine(spec, batch=3) as engine:
        _, go = held_up(engine, [5], max_new_tokens=1)
        answers = [engine.submit(prompt, **options) for prompt in prompts]
        go.set()
        with complains("not numbers"):
            list(answers[1])
        assert [answers[0].result().token_ids, answers[2].result().token_ids] == wanted[::2]


def test_an_error_of_the_model_ends_running_requests_but_not_later_ones(spec, around):
    prompts = random_prompts(3)
    lost = Event()
    options = {"max_new_tokens": 40}

    def losing(forward, cache, trees, *_):
        if len(trees) == 2 and not lost.is_set():
            lost.set()
            raise RuntimeError("device lost")
        return forward()

    around("forward_trees", losing)
    with Engine(spec, batch=2) as engine:
        first, go = held_up(engine, prompts[0], **options)
        second, third = (engine.submit(prompt, **options) for prompt in prompts[1:])
        go.set()
        for answer in (first, second):
            with pytest.raises(RuntimeError, match="device lost"):
                answer.result()
        assert third.result().token_ids == alone(spec, prompts[2], **options)


def test_bad_input_is_refused_at_once(head):
    with Engine(head) as engine:
        for prompt, options, complaint in [
            ([], {}, "prompt is empty"),
            ([5], {"temperature": -1.0}, "temperature is -1.0"),
            ([5], {"warmth": 1.0}, "no option warmth: there are .*top_k"),
            ([5] * 128, {}, "the prompt has 128 tokens"),
        ]:
            with complains(complaint):
                engine.submit(prompt, **options)
        assert (engine.running, engine.waiting) == (0, 0)
    for name, limit in {"batch": 0, "queue": -1, "columns": 0}.items():
        with complains(f"{name} is"):
            Engine(head, **{name: limit})


@pytest.mark.parametrize("finish", [True, False])
def test_closing_answers_what_was_asked_or_ends_it_and_leaves_nothing(head, finish):
    before = count_held()
    prompts = random_prompts(3)
    engine = Engine(head, batch=2)
    first, go = held_up(engine, prompts[0], **NEW)
    others = [engine.submit(prompt, **NEW) for prompt in prompts[1:]]
    closing = threading.Thread(target=engine.close, args=(finish,))
    closing.start()
    while not engine._closed:
        pass
    with complains("the engine is closed"):
        engine.submit(prompts[0])
    go.set()
    closing.join(60)
    for prompt, answer in zip(prompts, (first, *others), strict=True):
        if finish:
            assert answer.result().token_ids == alone(head, prompt, **NEW)
        else:
            with complains("the engine was closed"):
                list(answer)
    engine.close()
    assert count_held() == before
