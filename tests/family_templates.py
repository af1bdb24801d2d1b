"""Families of chat models: how each one's template shows a conversation, and how the model writes an answer.

Both after the published formats, and apart from each other: the template is what training renders, `write` is
what the model adds to a prompt.
"""

from chat_templates import each, prompt
from family_parts import BOTH, CALLS, IS, LAST_QUESTION, NO_THOUGHT, Family, closed_by, each_call, turns

# Llama 2, Zephyr, ChatML, Llama 3, Gemma 2 and 3, Phi 3 and 4: no thoughts, no calls.
LLAMA_2 = Family(
    turns("{{ ' ' + m['content'] + ' </s>' }}", other="{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"),
    lambda said: f" {said.content} </s>",
)
ZEPHYR = Family(
    each("{{ '<|' + m['role'] + '|>\\n' + m['content'] + '</s>\\n' }}") + prompt("<|assistant|>\\n"),
    closed_by("</s>"),
)
CHATML = Family(
    each("{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}")
    + prompt("<|im_start|>assistant\\n"),
    closed_by("<|im_end|>"),
)
HEADER_3 = "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
LLAMA_3 = Family(
    "{{ '<|begin_of_text|>' }}"
    + each(HEADER_3 + "{{ m['content'] | trim + '<|eot_id|>' }}")
    + prompt("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
    closed_by("<|eot_id|>"),
)
GEMMA_TURN = "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}"
GEMMA_2 = Family(
    "{{ '<bos>' }}"
    + each(GEMMA_TURN + "{{ m['content'] | trim + '<end_of_turn>\\n' }}")
    + prompt("<start_of_turn>model\\n"),
    closed_by("<end_of_turn>"),
)
GEMMA_3 = Family(
    "{{ '<bos>' }}{% set first = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}{% for m in rest %}"
    + GEMMA_TURN
    + "{{ (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    + prompt("<start_of_turn>model\\n"),
    closed_by("<end_of_turn>"),
)
PHI_TEXT_END = "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
PHI_3 = Family(
    each("{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}") + PHI_TEXT_END, closed_by("<|end|>")
)
PHI_4 = Family(
    each("{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}")
    + prompt("<|im_start|>assistant<|im_sep|>"),
    closed_by("<|im_end|>"),
)


# With calls: Phi 4 mini, Llama 3.1, Mistral, Qwen 2.5, Granite, LFM2.
def write_phi(said):
    call = f'<|tool_call|>{{"name": "look", "arguments": {{"at": "{said.call}"}}}}<|/tool_call|>'
    return said.content + call * bool(said.call) + "<|end|>"


PHI_4_MINI = Family(
    turns(
        "{{ '<|assistant|>' + m['content'] }}"
        + each_call("{{ '<|tool_call|>' + (c['function'] | tojson) + '<|/tool_call|>' }}")
        + "{{ '<|end|>' }}",
        "{{ '<|tool_response|>' + (m['content'] | tojson) + '<|end|>' }}",
        "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}",
    )
    + PHI_TEXT_END.replace("\\n", ""),
    write_phi,
    CALLS,
)


def write_llama(said):
    called = f'{{"name": "look", "parameters": {{"at": "{said.call}"}}}}'
    return (called if said.call else said.content) + "<|eot_id|>"


LLAMA_3_1 = Family(
    "{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' }}"
    "{{ (tools | tojson if tools else '') + '<|eot_id|>' }}"
    + each(
        "{% if m['tool_calls'] %}{% set f = m['tool_calls'][0]['function'] %}"
        + HEADER_3
        + "{{ '{\"name\": \"' + f['name'] + '\", \"parameters\": ' + (f['arguments'] | tojson) + '}<|eot_id|>' }}"
        f"{{% elif {IS('tool')} %}}"
        "{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m['content'] | tojson) + '<|eot_id|>' }}"
        "{% else %}" + HEADER_3 + "{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}"
    )
    + prompt("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
    write_llama,
    CALLS,
)


def write_mistral(said):
    call = f'[TOOL_CALLS] [{{"name": "look", "arguments": {{"at": "{said.call}"}}, "id": "call00001"}}]'
    return (call if said.call else f" {said.content}") + "</s>"


MISTRAL = Family(
    "{{ '<s>' }}"
    + turns(
        "{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}"
        "{{ '[TOOL_CALLS] [' + (c['function'] | tojson)[:-1] + ', \"id\": \"' + c['id'] + '\"}]</s>' }}{% endfor %}"
        "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}",
        "{{ '[TOOL_RESULTS] {\"content\": ' + m['content'] + ', \"call_id\": \"' + m['tool_call_id'] + '\"}' }}"
        "{{ '[/TOOL_RESULTS]' }}",
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}",
    ),
    write_mistral,
    CALLS,
)


def hermes_call(said):
    if not said.call:
        return ""
    call = f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{said.call}"}}}}\n</tool_call>'
    return "\n" * bool(said.content) + call


HERMES_CALLS = each_call(
    "{{ '\\n' if m['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": \"' + c['function']['name'] + '\", \"arguments\": ' }}"
    "{{ c['function']['arguments'] | tojson + '}\\n</tool_call>' }}"
)
HERMES_RESULT = (
    "{{ '<|im_start|>user' if messages[loop.index0 - 1]['role'] != 'tool' else '' }}"
    "{{ '\\n<tool_response>\\n' + m['content'] + '\\n</tool_response>' }}"
    "{{ '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1]['role'] != 'tool' else '' }}"
)
CHATML_TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
QWEN_2_5 = Family(
    "{{ '<|im_start|>system\\nYou are Qwen.' + (tools | tojson if tools else '') + '<|im_end|>\\n' }}"
    + turns(
        "{{ '<|im_start|>assistant\\n' + m['content'] }}" + HERMES_CALLS + "{{ '<|im_end|>\\n' }}",
        HERMES_RESULT,
        CHATML_TURN,
    )
    + prompt("<|im_start|>assistant\\n"),
    lambda said: said.content + hermes_call(said) + "<|im_end|>",
    CALLS,
)
GRANITE = Family(
    turns(
        "{{ '<|start_of_role|>assistant<|end_of_role|>' + m['content'] }}"
        + HERMES_CALLS
        + "{{ '<|end_of_text|>\\n' }}",
        "{{ '<|start_of_role|>user<|end_of_role|>\\n<tool_response>\\n' + m['content'] }}"
        "{{ '\\n</tool_response><|end_of_text|>\\n' }}",
        "{{ '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\\n' }}",
    )
    + prompt("<|start_of_role|>assistant<|end_of_role|>"),
    lambda said: said.content + hermes_call(said) + "<|end_of_text|>",
    CALLS,
)


def write_lfm(said):
    thought = f"<think>{said.thought}</think>" * bool(said.thought)
    call = f"<|tool_call_start|>[look(at='{said.call}')]<|tool_call_end|>" * bool(said.call)
    return thought + said.content + call + "<|im_end|>"


LFM_2 = Family(
    LAST_QUESTION
    + turns(
        "{{ '<|im_start|>assistant\\n' }}"
        "{% if m['thinking'] and loop.index0 > ns.last %}{{ '<think>' + m['thinking'] + '</think>' }}{% endif %}"
        "{{ m['content'] }}"
        + each_call(
            "{{ '<|tool_call_start|>[' + c['function']['name'] + '(at=\\'' + c['function']['arguments']['at'] }}"
            "{{ '\\')]<|tool_call_end|>' }}"
        )
        + "{{ '<|im_end|>\\n' }}",
        CHATML_TURN,
        CHATML_TURN,
    )
    + prompt("<|im_start|>assistant\\n"),
    write_lfm,
    BOTH,
)


# With thoughts: Qwen 3 and 3.5, GLM 4.5, gpt-oss, Gemma 4, DeepSeek-R1.
def write_qwen_3(said):
    thought = f"<think>\n{said.thought}\n</think>\n\n" * bool(said.thought)
    return thought + said.content + hermes_call(said) + "<|im_end|>"


QWEN_3 = Family(
    LAST_QUESTION
    + turns(
        "{{ '<|im_start|>assistant\\n' }}"
        "{% if loop.index0 > ns.last and (loop.last or m['reasoning_content']) %}"
        "{{ '<think>\\n' + (m['reasoning_content'] or '') + '\\n</think>\\n\\n' }}{% endif %}"
        "{{ m['content'] }}" + HERMES_CALLS + "{{ '<|im_end|>\\n' }}",
        HERMES_RESULT,
        CHATML_TURN,
    )
    + prompt("<|im_start|>assistant\\n")
    + "{% if add_generation_prompt %}" + NO_THOUGHT + "{% endif %}",
    write_qwen_3,
    BOTH,
)  # fmt: skip


def write_qwen_3_5(said):
    thought = f"<think>\n{said.thought}\n</think>\n\n" * bool(said.thought)
    call = f"<tool_call>\n<function=look>\n<parameter=at>\n{said.call}\n</parameter>\n</function>\n</tool_call>"
    return thought + said.content + call * bool(said.call) + "<|im_end|>"


QWEN_3_5 = Family(
    LAST_QUESTION
    + turns(
        "{{ '<|im_start|>assistant\\n' }}"
        "{% if loop.index0 > ns.last %}{{ '<think>\\n' + (m['reasoning_content'] or '') + '\\n</think>\\n\\n' }}"
        "{% endif %}{{ m['content'] }}"
        + each_call(
            "{{ '<tool_call>\\n<function=' + c['function']['name'] + '>\\n' }}"
            "{% for name, value in c['function']['arguments'] | items %}"
            "{{ '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}{% endfor %}"
            "{{ '</function>\\n</tool_call>' }}"
        )
        + "{{ '<|im_end|>\\n' }}",
        HERMES_RESULT,
        CHATML_TURN,
    )
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}",
    write_qwen_3_5,
    BOTH,
)


def write_glm(said):
    thought = f"\n<think>{said.thought}</think>" * bool(said.thought)
    words = f"\n{said.content}" * bool(said.content)
    call = f"\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{said.call}</arg_value>\n</tool_call>"
    return thought + words + (call + "<|observation|>" if said.call else "<|user|>")


GLM_4_5 = Family(
    "{{ '[gMASK]<sop>' }}"
    + LAST_QUESTION
    + turns(
        "{{ '<|assistant|>\\n<think>' + (m['reasoning_content'] or '' if loop.index0 > ns.last else '') }}"
        "{{ '</think>' + ('\\n' + m['content'] if m['content'] else '') }}"
        + each_call(
            "{{ '\\n<tool_call>' + c['function']['name'] + '\\n' }}"
            "{% for name, value in c['function']['arguments'] | items %}"
            "{{ '<arg_key>' + name + '</arg_key>\\n<arg_value>' + value + '</arg_value>\\n' }}{% endfor %}"
            "{{ '</tool_call>' }}"
        ),
        "{{ '<|observation|>\\n<tool_response>\\n' + m['content'] + '\\n</tool_response>' }}",
        "{{ '<|' + m['role'] + '|>\\n' + m['content'] }}"
        "{{ '/nothink' if m['role'] == 'user' and enable_thinking is defined and not enable_thinking else '' }}",
    )
    + "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}",
    write_glm,
    BOTH,
)


def write_gpt_oss(said):
    channel = "<|start|>assistant<|channel|>"
    thought = f"{channel}analysis<|message|>{said.thought}<|end|>" * bool(said.thought)
    final = f"{channel}final<|message|>{said.content}<|return|>"
    call = f'<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{{"at": "{said.call}"}}<|call|>'
    return (thought + (call if said.call else final)).removeprefix("<|start|>assistant")


GPT_OSS = Family(
    "{{ '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}"
    + turns(
        "{% set think %}{% if m['thinking'] %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m['thinking'] + '<|end|>' }}{% endif %}{% endset %}"
        "{% if m['tool_calls'] %}{% set f = m['tool_calls'][0]['function'] %}"
        "{% set later = namespace(final=false) %}{% for n in messages[loop.index:] %}"
        "{% if n['role'] == 'assistant' and not n['tool_calls'] %}{% set later.final = true %}{% endif %}{% endfor %}"
        "{{ '' if later.final else think }}"
        "{{ '<|start|>assistant to=functions.' + f['name'] + '<|channel|>commentary json<|message|>' }}"
        "{{ f['arguments'] | tojson + '<|call|>' }}"
        "{% elif loop.last and not add_generation_prompt %}"
        "{{ think + '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|return|>' }}"
        "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' }}{% endif %}",
        "{{ '<|start|>functions.look to=assistant<|channel|>commentary<|message|>' }}"
        "{{ m['content'] | tojson + '<|end|>' }}",
        "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}",
    )
    + prompt("<|start|>assistant"),
    write_gpt_oss,
    BOTH,
)


def write_gemma_4(said):
    thought = f"<|channel>thought\n{said.thought}\n<channel|>" * bool(said.thought)
    call = f'<|tool_call>call:look{{at:<|"|>{said.call}<|"|>}}<tool_call|><|tool_response>'
    return thought + (call if said.call else said.content + "<turn|>")


GEMMA_4_CALL = each_call(
    "{{ '<|tool_call>call:' + c['function']['name'] + '{at:<|\"|>' + c['function']['arguments']['at'] }}"
    "{{ '<|\"|>}<tool_call|>' }}"
)
GEMMA_4_SYSTEM = (
    "{{ '<bos>' }}{% if enable_thinking is defined and enable_thinking %}"
    "{{ '<|turn>system\\n<|think|><turn|>\\n' }}{% endif %}"
)
# A tool's result goes on with the turn that called it: the model writes the token that opens it.
GEMMA_4_TURNS = turns(
    "{{ '' if messages[loop.index0 - 1]['role'] == 'tool' else '<|turn>model\\n' }}"
    "{% if m['reasoning_content'] and loop.index0 > ns.last %}"
    "{{ '<|channel>thought\\n' + m['reasoning_content'] + '\\n<channel|>' }}{% endif %}"
    + GEMMA_4_CALL
    + "{{ '<|tool_response>' if m['tool_calls'] else m['content'] + '<turn|>\\n' }}",
    "{{ 'response:look{value:' + m['content'] + '}<tool_response|>' }}",
    "{{ '<|turn>' + m['role'] + '\\n' + m['content'] + '<turn|>\\n' }}",
)
GEMMA_4_PROMPT = (
    "{% if add_generation_prompt %}{% if messages[-1]['role'] != 'tool' %}{{ '<|turn>model\\n' }}"
    "{% elif enable_thinking %}{{ '<|channel>thought\\n' }}{% endif %}{% endif %}"
)
GEMMA_4 = Family(GEMMA_4_SYSTEM + LAST_QUESTION + GEMMA_4_TURNS + GEMMA_4_PROMPT, write_gemma_4, BOTH)
# As the larger ones were published first: without thinking, the prompt ends in an empty thought.
EMPTY_CHANNEL = (
    "{% if add_generation_prompt and not enable_thinking | default(false) %}"
    "{{ '<|channel>thought\\n<channel|>' }}{% endif %}"
)
GEMMA_4_EMPTY = Family(
    GEMMA_4_SYSTEM + LAST_QUESTION + GEMMA_4_TURNS + GEMMA_4_PROMPT + EMPTY_CHANNEL, write_gemma_4, BOTH
)
DEEPSEEK_R1 = Family(
    "{{ '<s>' }}"
    + turns(
        "{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}",
        other="{{ ('<｜User｜>' if m['role'] == 'user' else '') + m['content'] }}",
    )
    + prompt("<｜Assistant｜><think>\\n"),
    lambda said: f"<think>\n{said.thought}\n</think>\n\n{said.content}<｜end▁of▁sentence｜>",
    ("raw thoughts",),
)

FAMILIES = {
    "Llama 2": LLAMA_2,
    "Llama 3": LLAMA_3,
    "Llama 3.1": LLAMA_3_1,
    "Qwen 2.5": QWEN_2_5,
    "Qwen 3": QWEN_3,
    "Qwen 3.5": QWEN_3_5,
    "gpt-oss": GPT_OSS,
    "Gemma 2": GEMMA_2,
    "Gemma 3": GEMMA_3,
    "Gemma 4": GEMMA_4,
    "Gemma 4, empty thought": GEMMA_4_EMPTY,
    "Phi 3": PHI_3,
    "Phi 4": PHI_4,
    "Phi 4 mini": PHI_4_MINI,
    "Mistral": MISTRAL,
    "DeepSeek-R1": DEEPSEEK_R1,
    "GLM 4.5": GLM_4_5,
    "Granite": GRANITE,
    "LFM2": LFM_2,
    "Zephyr": ZEPHYR,
    "ChatML": CHATML,
}
