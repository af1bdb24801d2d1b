"""What training learns: the very tokens that a model generated, in the context that it generated them in."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers as hf
from models import GROUPED, random_model
from training import family_template, family_tokenizer, list_learnt_answers, read_examples

from treespec.api.spec import Spec
from treespec.model.target import Target
from treespec.text import templates
from treespec.text.turns import split_thought


@dataclass(frozen=True)
class Said:
    """What an answer consists of. call: the argument of a call of `look`. thinks: whether the model does at all."""

    thought: str = ""
    content: str = ""
    call: str = ""
    thinks: bool = False


def write_phi(said):
    call = f'<|tool_call|>{{"name": "look", "arguments": {{"at": "{said.call}"}}}}<|/tool_call|>'
    return said.content + call * bool(said.call) + "<|end|>"


def write_llama(said):
    called = f'{{"name": "look", "parameters": {{"at": "{said.call}"}}}}'
    return (called if said.call else said.content) + "<|eot_id|>"


def write_mistral(said):
    call = f'[TOOL_CALLS] [{{"name": "look", "arguments": {{"at": "{said.call}"}}, "id": "call00001"}}]'
    return (call if said.call else f" {said.content}") + "</s>"


def hermes_call(said):
    if not said.call:
        return ""
    call = f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{said.call}"}}}}\n</tool_call>'
    return "\n" * bool(said.content) + call


def write_lfm(said):
    thought = f"<think>{said.thought}</think>" * bool(said.thought)
    call = f"<|tool_call_start|>[look(at='{said.call}')]<|tool_call_end|>" * bool(said.call)
    return thought + said.content + call + "<|im_end|>"


def write_qwen_3(said):
    thought = f"<think>\n{said.thought}\n</think>\n\n" * bool(said.thought)
    return thought + said.content + hermes_call(said) + "<|im_end|>"


def write_qwen_3_5(said):
    thought = f"<think>\n{said.thought}\n</think>\n\n" * bool(said.thought)
    call = f"<tool_call>\n<function=look>\n<parameter=at>\n{said.call}\n</parameter>\n</function>\n</tool_call>"
    return thought + said.content + call * bool(said.call) + "<|im_end|>"


def write_glm(said):
    thought = f"\n<think>{said.thought}</think>" * bool(said.thought)
    words = f"\n{said.content}" * bool(said.content)
    call = f"\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{said.call}</arg_value>\n</tool_call>"
    return thought + words + (call + "<|observation|>" if said.call else "<|user|>")


def write_gpt_oss(said):
    channel = "<|start|>assistant<|channel|>"
    thought = f"{channel}analysis<|message|>{said.thought}<|end|>" * bool(said.thought)
    final = f"{channel}final<|message|>{said.content}<|return|>"
    call = f'<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{{"at": "{said.call}"}}<|call|>'
    return (thought + (call if said.call else final)).removeprefix("<|start|>assistant")


def write_gemma_4(said):
    thought = f"<|channel>thought\n{said.thought}\n<channel|>" * bool(said.thought)
    call = f'<|tool_call>call:look{{at:<|"|>{said.call}<|"|>}}<tool_call|><|tool_response>'
    return thought + (call if said.call else said.content + "<turn|>")


def closed_by(end: str) -> Callable[[Said], str]:
    """A model that neither thinks nor calls."""
    return lambda said: said.content + end


@dataclass(frozen=True)
class Family:
    """write: what the model adds to a prompt. kinds: of conversations beside plain ones that it has.

    Both after the published formats, and apart from each other: a template (tests/families) is what training renders.
    """

    write: Callable[[Said], str]
    kinds: tuple[str, ...] = ()

    def written(self, said, before):
        """What the model writes behind a prompt, which may have opened its thought."""
        text = self.write(said)
        opened = max((o for o in ("<think>\n", "<|channel>thought\n") if before.endswith(o)), key=len, default="")
        return text.removeprefix(opened)


CALLS = ("calls",)
BOTH = ("thoughts", "calls", "thoughts and calls")
FAMILIES = {
    "Llama 2": Family(lambda said: f" {said.content} </s>"),
    "Llama 3": Family(closed_by("<|eot_id|>")),
    "Llama 3.1": Family(write_llama, CALLS),
    "Qwen 2.5": Family(lambda said: said.content + hermes_call(said) + "<|im_end|>", CALLS),
    "Qwen 3": Family(write_qwen_3, BOTH),
    "Qwen 3.5": Family(write_qwen_3_5, BOTH),
    "gpt-oss": Family(write_gpt_oss, BOTH),
    "Gemma 2": Family(closed_by("<end_of_turn>")),
    "Gemma 3": Family(closed_by("<end_of_turn>")),
    "Gemma 4": Family(write_gemma_4, BOTH),
    "Gemma 4, empty thought": Family(write_gemma_4, BOTH),
    "Phi 3": Family(closed_by("<|end|>")),
    "Phi 4": Family(closed_by("<|im_end|>")),
    "Phi 4 mini": Family(write_phi, CALLS),
    "Mistral": Family(write_mistral, CALLS),
    "DeepSeek-R1": Family(
        lambda said: f"<think>\n{said.thought}\n</think>\n\n{said.content}<｜end▁of▁sentence｜>", ("raw thoughts",)
    ),
    "GLM 4.5": Family(write_glm, BOTH),
    "Granite": Family(lambda said: said.content + hermes_call(said) + "<|end_of_text|>", CALLS),
    "LFM2": Family(write_lfm, BOTH),
    "Zephyr": Family(closed_by("</s>")),
    "ChatML": Family(closed_by("<|im_end|>")),
}
PUBLISHED = {  # templates that trl ships, by family
    "Llama 3": ("llama3",),
    "Llama 3.1": ("llama3_1", "llama3_2"),
    "Qwen 2.5": ("qwen2_5", "qwen3_instruct_2507"),
    "Qwen 3": ("qwen3",),
    "Qwen 3.5": ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
    "gpt-oss": ("gptoss",),
    "Gemma 2": ("gemma",),
    "Gemma 3": ("gemma3",),
    "Gemma 4": ("gemma4_v5",),
    "Phi 3": ("phi3", "phi3_5"),
    "DeepSeek-R1": ("deepseek_r1_distill",),
    "GLM 4.5": ("glm4moe",),
    "LFM2": ("lfm2_2_5",),
}
QUESTIONS = ("Why?", "And then?")
KINDS = {  # of a conversation: whether the model thinks, and whether it calls a tool before it answers
    "plain": (False, False),
    "thoughts": (True, False),
    "calls": (False, True),
    "thoughts and calls": (True, True),
    "raw thoughts": (True, False),
}
CASES = [(name, kind) for name, family in FAMILIES.items() for kind in ("plain", *family.kinds)]
CASES.remove(("DeepSeek-R1", "plain"))  # its prompt opens a thought in any case


@cache
def tiny_spec():
    """A model of one layer, one token a byte."""
    tokenizer = family_tokenizer()
    config = hf.LlamaConfig(
        **GROUPED | {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "max_position_embeddings": 4096}
    )
    return Spec(Target(random_model(config), tokenizer), None)


def generated_words(prompt, count, seed):
    """Words of three letters that the tiny model generates after a prompt."""
    output = tiny_spec().generate(prompt, regex="[a-z]{9}", max_new_tokens=9, temperature=1.0, seed=seed)
    return [output.text[3 * i : 3 * i + 3] for i in range(count)]


def as_message(said, raw):
    """What a server would make of an answer."""
    message = {"role": "assistant", "content": said.content}
    if raw:
        message["content"] = f"{said.thought}\n</think>\n\n{said.content}"
    elif said.thought:
        message["reasoning_content"] = said.thought
    if said.call:
        function = {"name": "look", "arguments": json.dumps({"at": said.call})}
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    return message


def as_template_takes_it(message):
    """With arguments as an object and thoughts under each name."""
    shown = dict(message)
    if thought := message.get("reasoning_content"):
        shown |= {"thinking": thought, "reasoning": thought}
    if calls := message.get("tool_calls"):
        function = {"name": "look", "arguments": json.loads(calls[0]["function"]["arguments"])}
        shown["tool_calls"] = [calls[0] | {"function": function}]
    return shown


def generated_conversation(family, tokenizer, kind):
    """(messages, [(prompt, answer) in token ids of each answer]) of two questions."""
    thinks, calls = KINDS[kind]
    messages = []
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for calling in (True, False) if calls else (False,):
            shown = [as_template_takes_it(message) for message in messages]
            variables = {"enable_thinking": thinks, "thinking": thinks}
            prompt = templates.encode_messages(tokenizer, shown, chat_template_kwargs=variables)
            thought, content, argument = generated_words(prompt, 3, seed=len(answers))
            said = Said(thought * thinks, "" if calling else content, argument * calling)
            answer = tokenizer(family.written(said, tokenizer.decode(prompt)), add_special_tokens=False)["input_ids"]
            answers.append((prompt, answer))
            messages.append(as_message(said, kind == "raw thoughts"))
            if calling:
                messages.append({"role": "tool", "content": "sun", "name": "look", "tool_call_id": "call00001"})
    return messages, answers


@cache
def conversation_of(name, kind):
    """`generated_conversation` by the family's own template, to read only."""
    return generated_conversation(FAMILIES[name], family_tokenizer(family_template(name)), kind)


@pytest.mark.parametrize("name, kind", CASES)
def test_what_a_model_generates_is_exactly_what_is_learnt(name, kind, tmp_path):
    tokenizer = family_tokenizer(family_template(name))
    messages, answers = conversation_of(name, kind)
    examples, report = read_examples(tmp_path, tokenizer, {"messages": messages})
    assert sorted(list_learnt_answers(examples)) == sorted(answers)
    assert (report.used, report.left_out, report.thoughtless) == (1, {}, 0)


@pytest.mark.parametrize("name, kind", [case for case in CASES if case[0] in PUBLISHED])
def test_published_templates_are_learnt_as_exactly_where_they_are_installed(name, kind, tmp_path):
    """trl ships the families' own templates: `pip install --no-deps trl`."""
    package = find_spec("trl")
    if package is None:
        pytest.skip("trl is not installed")
    for file in PUBLISHED[name]:
        own = Path(package.submodule_search_locations[0], "chat_templates", f"{file}.jinja").read_text()
        tokenizer = family_tokenizer(own)
        if name == "Phi 3":
            tokenizer.eos_token = "<|endoftext|>"
        messages, answers = generated_conversation(FAMILIES[name], tokenizer, kind)
        examples, _ = read_examples(tmp_path, tokenizer, {"messages": messages})
        assert sorted(list_learnt_answers(examples)) == sorted(answers), file


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "thoughts" in family.kinds])
def test_what_a_model_wrote_is_split_into_thoughts_and_words(name):
    family = FAMILIES[name]
    tokenizer = family_tokenizer(family_template(name))
    before = [{"role": "user", "content": QUESTIONS[0]}]
    if name == "Gemma 4, empty thought":  # its prompt ends the thought, unless it is asked to think
        assert split_thought(tokenizer, None, before, "abc<turn|>") is None
        return
    prompt = templates.render(tokenizer, before)
    for thought, parts in (("abc", ("abc", "def")), ("", None)):
        written = family.written(Said(thought, "def", thinks=True), prompt)
        assert split_thought(tokenizer, None, before, written) == parts


@pytest.mark.parametrize("name, kind", [case for case in CASES if "raw" not in case[1]])
def test_formatted_text_learns_answers_and_no_words_of_others(name, kind, tmp_path):
    tokenizer = family_tokenizer(family_template(name))
    messages, _ = conversation_of(name, kind)
    shown = [as_template_takes_it(message) for message in messages]
    text = templates.render(tokenizer, shown, add_generation_prompt=False)
    examples, _ = read_examples(tmp_path, tokenizer, {"text": text})
    learnt = [tokenizer.decode(answer) for _, answer in list_learnt_answers(examples)]
    plain = [message["content"] for message in messages if message["role"] == "assistant" and message["content"]]
    if "calls" not in kind:  # an answer behind a tool's result has no header under Gemma 4 and Mistral
        assert [words in part for words, part in zip(plain, learnt, strict=True)] == [True, True]
    assert learnt
    assert not [word for word in ("Why", "then", "sun") if word in "".join(learnt)]
