"""Language models that draft, with the target's vocabulary and with another one."""

import copy

import pytest
import torch
import transformers as hf
from commands import complains
from models import CONFIGS, GROUPED, MODELS, as_undrafted, close, prompt, random_model, seeded, small, target, tiny
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from training import save_model, sentence_piece, tokenizer

from treespec import load
from treespec.api.spec import Spec
from treespec.draft.auto.measure import measure_model_costs
from treespec.draft.drafter import Frontier
from treespec.draft.models.model import ModelProposer, OtherVocabulary
from treespec.draft.models.other_vocabulary import (
    SPECIAL_PREFIX,
    SharedVocabulary,
    build_shared_vocabulary,
    decode_all_tokens,
    find_start_tokens,
    find_token_difference,
)
from treespec.draft.models.skip import SkipProposer
from treespec.draft.models.skip_set import SkipSet
from treespec.model.target import Target


def model_of(words, seed=5, **changes):
    sizes = {"vocab_size": len(words), "max_position_embeddings": 256, "num_hidden_layers": 2}
    return Target(random_model(hf.LlamaConfig(**GROUPED | sizes | changes), seed), words)


@pytest.fixture(scope="module")
def pair():
    """A byte-level target, and a draft model of SentencePiece's form."""
    target = model_of(tokenizer(), seed=0)
    draft = model_of(sentence_piece())
    words = build_shared_vocabulary(target.tokenizer, draft.tokenizer, target.vocab_size, draft.vocab_size)
    return target, OtherVocabulary(draft, target, words)


def test_both_forms_give_the_bytes_of_their_text():
    text = "the user's\n\tanswer: zürich \N{SNOWMAN} 12"
    for words in (tokenizer(), sentence_piece()):
        table = decode_all_tokens(words)
        ids = words.encode(text, add_special_tokens=False)
        assert b"".join(table[number] for number in ids).decode() == text


def test_shared_tokens_stand_for_the_same_text(pair):
    target, draft = pair
    ours = decode_all_tokens(target.tokenizer)
    theirs = decode_all_tokens(draft.model.tokenizer)
    words = draft.words
    assert words.target.tolist() == sorted(words.target.tolist())
    assert [ours[n] for n in words.target.tolist()] == [theirs[n] for n in words.draft.tolist()]
    missing = set(ours) - set(words.target.tolist())
    assert not {ours[n] for n in missing} & set(theirs.values())
    assert 0.5 < words.share < 1


def test_special_tokens_are_shared_by_name_alone(pair):
    target, draft = pair
    shared = set(draft.words.target.tolist())
    assert target.tokenizer.convert_tokens_to_ids("<pad>") in shared
    assert target.tokenizer.convert_tokens_to_ids("</s>") not in shared  # the other's is <eos>
    text = build_shared_vocabulary(tokenizer(), sentence_piece(specials=("</s", "<bos>", "<eos>", "<pad>")), 999, 999)
    assert all(
        not value.startswith(SPECIAL_PREFIX + b"</s")
        for value in (decode_all_tokens(tokenizer())[n] for n in text.target.tolist())
    )


@pytest.mark.parametrize("text", ["the unhappy question", "zürich \N{SNOWMAN}\n", "<s>user: 12</s>"])
def test_other_tokens_are_spelled_by_their_bytes(pair, text):
    target, draft = pair
    table = decode_all_tokens(draft.model.tokenizer)
    ids = target.tokenizer.encode(text)
    spelled = [number for token in ids for number in draft.words.encode_bytes_of(token)]
    assert b"".join(table[number] for number in spelled).decode() == text


def test_of_equal_bytes_the_token_that_is_no_byte_counts():
    draft = sentence_piece()
    words = build_shared_vocabulary(tokenizer(), draft, 999, 999)
    by_token = dict(zip(words.target.tolist(), words.draft.tolist(), strict=True))
    a = tokenizer().convert_tokens_to_ids("a")
    assert draft.convert_ids_to_tokens(by_token[a]) == "a"


def test_so_it_does_in_the_target():
    """A target that says the token `a` must not be drafted the byte <0x61>."""
    vocab = {"<0x61>": 0, "<0x62>": 1, "a": 2}  # bytes first, as Llama 2 has them
    target = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab, [], byte_fallback=True)))
    assert build_shared_vocabulary(target, tokenizer(), 999, 999).target.tolist() == [1, 2]


def test_no_shared_token_is_one_line(tmp_path):
    with complains("share no token"):
        build_shared_vocabulary(tokenizer(), without_shared_tokens(), 999, 999)
    target = save_model(tmp_path / "target")
    draft = save_model(tmp_path / "draft")
    without_shared_tokens().save_pretrained(draft)
    with complains(r"cannot draft for this target: the two vocabularies share no token"):
        load(str(target), drafter=f"model:{draft}")


def test_logits_are_the_models_own_after_the_same_text(pair):
    target, draft = pair
    cache, together = join_texts(target, draft)
    before = read_contents(cache)
    for _ in range(2):
        for text, path, logits in draft_level_logits(together, cache):
            tokens = [*find_start_tokens(draft.model.tokenizer)]
            tokens += [n for token in text for n in draft.words.encode_bytes_of(token)]
            tokens += draft.words.draft[list(path)].tolist()
            alone = draft.model.model(torch.tensor([tokens])).logits[0, -1][draft.words.draft]
            close(logits, alone, 2e-4, 2e-4)
    assert has_same_contents(before, read_contents(cache))


def test_a_text_of_the_targets_start_alone_may_follow_another(pair):
    _, draft = pair
    one = draft.new()
    one.skipped = frozenset({1})  # as a tokenizer that begins every text with <s>
    first = one.begin(torch.tensor([1]))[0]
    one.rewind([0])
    close(one.begin(torch.tensor([1]))[0], first, 1e-5)


def test_a_model_with_the_targets_weights_is_accepted_where_it_can_be(pair):
    """A vocabulary in another order shares all tokens, and drafts what the target says."""
    target, _ = pair
    order = torch.randperm(target.vocab_size, generator=seeded(0))
    model = random_model(hf.LlamaConfig(**target.config.to_dict()), 0)
    model.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight.copy_(weight[order])
    place = {int(old): new for new, old in enumerate(order)}
    by_bytes = {text: place[number] for number, text in decode_all_tokens(target.tokenizer).items()}
    every = torch.arange(target.vocab_size)
    draft = torch.tensor([place[number] for number in every.tolist()])
    words = SharedVocabulary(every, draft, decode_all_tokens(target.tokenizer), by_bytes)
    spec = Spec(target, OtherVocabulary(Target(model, target.tokenizer), target, words), "chain:4", "single")
    for temperature in (0.0, 1.0):
        stats = spec.generate("the user", max_new_tokens=20, temperature=temperature, seed=1).stats
        assert stats.acceptance_length == 5


def test_the_command_names_the_share(tmp_path, caplog):
    target = save_model(tmp_path / "target")
    draft = tmp_path / "draft"
    words = sentence_piece()
    save_model(draft, vocab_size=len(words), num_hidden_layers=1)
    words.save_pretrained(draft)
    spec = load(str(target), drafter=f"model:{draft}", dtype="float32")
    (line,) = [record.getMessage() for record in caplog.records if "another vocabulary" in record.getMessage()]
    assert "tokens that both have" in line
    as_undrafted(spec, ["the user"], 8)


TEXTS = ([7, 9, 4, 30, 11, 52, 8], [5], [20, 21, 3, 44, 17, 60, 33, 12, 6, 58, 41])  # the last token is the root


def join_texts(target, proposer, texts=TEXTS):
    """The target's cache of all texts but for their roots, and a proposer that has observed them."""
    caches = []
    proposers = []
    for text in texts:
        cache = target.build_cache(capacity=8)
        one = proposer.new()
        if len(text) > 1:
            features = target.prefill(cache, torch.tensor([text[:-1]]))
            one.observe([features[0]], [torch.tensor(text)])
        caches.append(cache)
        proposers.append(one)
    caches[0].join(caches[1:])
    proposers[0].join(proposers[1:])
    return caches[0], proposers[0]


def draft_level_logits(proposer, cache, texts=TEXTS):
    """(text, drafted tokens, logits) at every node that is reached: the frontiers of the texts differ in width."""
    nodes = [[()] for _ in texts]
    found = []
    logits = proposer.begin(torch.tensor([text[-1] for text in texts]), cache)
    for level, widths in enumerate([(3, 1, 2), (2, 0, 3), ()]):
        for text, paths, rows in zip(texts, nodes, logits, strict=True):
            found += [(text, path, one) for path, one in zip(paths, rows, strict=True)]
        frontiers = []
        for row, width in enumerate(widths):
            above = [(3 * i + 1) % len(nodes[row]) for i in range(width)]
            tokens = [(13 * i + 5 * level + 7 * row) % 60 + 3 for i in range(width)]
            nodes[row] = [(*nodes[row][a], token) for a, token in zip(above, tokens, strict=True)]
            frontiers.append(Frontier(torch.tensor(tokens), torch.tensor(above)) if width else None)
        logits = proposer.extend(frontiers) if widths else []
    return found


def read_contents(cache):
    """What of a cache may not change while drafts are made."""
    kept = [
        (layer.length, *(states[row, :, :n].clone() for states in layer.storage for row, n in enumerate(cache.lengths)))
        for layer in cache.tree_layers
    ]
    return list(cache.lengths), kept


def has_same_contents(before, after):
    lengths, layers = before
    return lengths == after[0] and all(
        a[0] == b[0] and all(map(torch.equal, a[1:], b[1:])) for a, b in zip(layers, after[1], strict=True)
    )


def without_shared_tokens():
    """A byte-level tokenizer of symbols that no text of the others holds."""
    model = Tokenizer(BPE(vocab={"\u4e00": 0, "\u4e01": 1}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return hf.PreTrainedTokenizerFast(tokenizer_object=model)


TOLERANCE = 2e-4  # float32, logits of order 1 to 10
LONG = [*TEXTS[:2], [(7 * i) % 60 + 3 for i in range(31)]]


@pytest.mark.parametrize("name", ["llama", "mistral-window-6", "gpt2", "qwen3_next"])
def test_logits_at_every_node_are_those_of_plain_models_along_the_path(name):
    whole = target("llama")
    config = CONFIGS[name]() if name in CONFIGS else tiny(MODELS[name])
    proposer = ModelProposer(Target(random_model(config, seed=5)), whole)
    cache, together = join_texts(whole, proposer, LONG)
    for _ in range(2):  # a second time from the same roots, as after an interrupt
        for text, path, logits in draft_level_logits(together, cache, LONG):
            wanted = proposer.model.model(torch.tensor([[*text, *path]])).logits[0, -1]
            close(logits, wanted, TOLERANCE, TOLERANCE)


SKIPPED_SUBLAYERS = SkipSet(3, attention=(1,), mlp=(0, 1))


def remove_sublayers(model, skipped):
    """A copy whose skipped sublayers add nothing, because the weights that they end in are zero."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for number in skipped.attention:
            model.model.layers[number].self_attn.o_proj.weight.zero_()
        for number in skipped.mlp:
            model.model.layers[number].mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize("name", ["llama", "mistral-window-6", "gemma3"])
def test_skipping_logits_are_those_of_a_plain_model_over_the_whole_targets_keys(name):
    whole = target(name)
    without = remove_sublayers(whole.model, SKIPPED_SUBLAYERS)
    cache, together = join_texts(whole, SkipProposer(whole, SKIPPED_SUBLAYERS), LONG)
    for text, path, logits in draft_level_logits(together, cache, LONG):
        past = hf.DynamicCache(config=whole.config)
        if text[:-1]:
            whole.model(input_ids=torch.tensor([text[:-1]]), past_key_values=past)
        wanted = without(input_ids=torch.tensor([[text[-1], *path]]), past_key_values=past).logits[0, -1]
        close(logits, wanted, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize(
    "build", [lambda whole: ModelProposer(small(), whole), lambda whole: SkipProposer(whole, SKIPPED_SUBLAYERS)]
)
def test_drafting_leaves_the_target_and_its_cache_as_they_were(build):
    whole = target("llama")
    modules = dict(whole.model.named_modules())
    cache, together = join_texts(whole, build(whole), LONG)
    before = read_contents(cache)
    draft_level_logits(together, cache, LONG)
    assert has_same_contents(before, read_contents(cache))
    assert dict(whole.model.named_modules()) == modules


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_the_target_is_accepted_whole(temperature):
    spec = Spec(target("llama"), ModelProposer(target("llama"), target("llama")), "chain:4", "single")
    stats = spec.generate(prompt(), max_new_tokens=40, temperature=temperature, seed=1, ignore_eos=True).stats
    assert stats.accepted == [4] * 8
    assert stats.acceptance_length == 5


def test_draft_models_can_be_timed_for_trees_chosen_by_cost():
    model = target("llama")
    cost = measure_model_costs(model, ModelProposer(small(), model))
    assert cost.level + cost.begin > 0
    spec = Spec(model, ModelProposer(small(), model), "auto:nodes=12,depth=4", times=cost)
    as_undrafted(spec, [prompt()], 16)


def test_it_runs_over_every_committed_token_once(monkeypatch):
    proposer = ModelProposer(small(), target("llama"))
    seen = []
    original = Target.prefill
    monkeypatch.setattr(Target, "prefill", lambda self, *a, **k: seen.append((self, a[1])) or original(self, *a, **k))
    out = Spec(target("llama"), proposer, "chain:3").generate(prompt(length=50), max_new_tokens=20)
    run = torch.cat([tokens[0] for model, tokens in seen if model is proposer.model]).tolist()
    text = prompt(length=50) + out.token_ids
    assert len(run) > len(text) - 5
    assert run == text[: len(run)]


@pytest.mark.parametrize("vocab_size, missing", [(56, 8), (80, 0)])
def test_padding_of_either_embedding_is_no_difference(vocab_size, missing):
    """For a target of 64 tokens: what is missing is never drafted."""
    one = ModelProposer(small(vocab_size=vocab_size), target("llama"))
    spec = Spec(target("llama"), one, "2x3")
    as_undrafted(spec, [[60, 5]], 16)
    _, together = join_texts(target("llama"), one)
    (logits, *_) = together.begin(torch.tensor([8, 5, 41]))
    assert (logits.shape, int(logits.isinf().sum())) == ((1, 64), missing)


def test_another_tokenizer_is_noticed_by_the_first_token_that_differs(tmp_path):
    words = save_model(tmp_path / "target")
    others = save_model(tmp_path / "others")
    table = tokenizer().get_vocab()
    a, b = (next(token for token, i in table.items() if i == number) for number in (40, 42))
    text = tokenizer().backend_tokenizer.to_str()
    (others / "tokenizer.json").write_text(text.replace(f'"{a}":40', f'"{a}":42').replace(f'"{b}":42', f'"{b}":40'))
    target = Target.load(str(words))
    model = Target.load(str(others))
    assert (
        find_token_difference(target.tokenizer, model.tokenizer, 400, 400) == f"token 40 is '{b}', the target's '{a}'"
    )


def test_without_tokenizers_the_vocabularies_must_be_of_one_size():
    assert find_token_difference(None, None, 64, 64) is None
    assert "56 and 64" in find_token_difference(None, None, 64, 56)
