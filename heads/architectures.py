"""The architectures of draft heads that other projects write, and whether treespec reads them. No torch.

Projects name an architecture in `architectures`, in `speculators_model_type`, or in the
`projector_type` of `dflash_config`. `heads.registry` detects the kind of a head mostly by its tensors. Some
architectures that treespec cannot compute have the same tensors: this table refuses them by name.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from treespec.files.atomic import Fields as Config

SPECULATORS_TYPE = "speculators_model_type"
SPECULATORS_KINDS = ("dflash", "dflash2", "dspark", "eagle", "eagle3", "peagle")


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    Attributes:
        name: the common name.
        projects: the projects that write or serve it.
        marks: a pattern of its names in config.json, matched in full and without case.
        kind: treespec's kind of head that reads it; "": treespec does not read it yet.
        reason: why treespec does not read it, and what to use instead.
        version: what was read to write the reader, and the day; "": before November 2026.
        drafter: of what is no head, the drafter that takes its directory; "": it is a head.
    """

    name: str
    projects: str
    marks: str
    kind: str = ""
    reason: str = ""
    version: str = ""
    drafter: str = ""


IS_LANGUAGE_MODEL = "it is a language model of its own, no head"
# The first row that matches a name counts, so special names come before general ones.
KNOWN_ARCHITECTURES = (
    Architecture(
        "DFlash 2",
        "z-lab, SpecForge, NeMo AutoModel, speculators, vLLM, SGLang",
        r"(qwen3)?dflash2(draftmodel|speculator)?|dflash-2",
        "dflash2",
        version="speculators 0.9.0, NeMo AutoModel 0.7.0; 2026-11-30",
    ),
    Architecture(
        "DSpark",
        "DeepSpec, SpecForge, speculators, vLLM, SGLang, NeMo AutoModel, llama.cpp",
        r"(qwen3)?dspark(draftmodel|model|speculator)?",
        "dspark",
        version="DeepSpec afdfa7c, SpecForge 0.2.0, speculators 0.9.0; 2026-11-30",
    ),
    Architecture(
        "DSpark of other layers",
        "DeepSpec, NeMo AutoModel, vLLM, SGLang",
        r".*dspark.*",
        reason="it has decoder layers that are not Qwen3's",
    ),
    Architecture(
        "DSpine",
        "SpecForge; Tencent, by its converter",
        r"dspine(draftmodel)?",
        "dspine",
        version="SpecForge 9aafadf; 2026-11-30",
    ),
    Architecture(
        "DSpine of other projects",
        "Tencent, vLLM",
        r".*dspine.*",
        reason="it has a layout that treespec was not compared with: SpecForge's converter writes the one that loads",
    ),
    Architecture(
        "Domino",
        "SpecForge, NeMo AutoModel",
        r"domino(draftmodel)?",
        "domino",
        version="SpecForge 0.2.0; 2026-11-30",
    ),
    Architecture("DFlare", "speculators", r"dflare.*", reason="treespec was not compared with it"),
    Architecture(
        "DeLS-Spec",
        "speculators",
        r"dels_?spec.*",
        reason="it has a local head over the tokens drafted so far",
    ),
    Architecture(
        "JetSpec of speculators",
        "speculators",
        r"jetspec.*",
        reason="it has rows of drafted tokens where DFlash has mask tokens",
    ),
    Architecture(
        "XPress",
        "speculators",
        r"xpress.*",
        reason="it refines all tokens of a block together in several passes, so a tree's nodes have no draft "
        "probabilities of their own",
        version="speculators 0.9.0; 2026-11-30",
    ),
    Architecture(
        "DFlash of other layers",
        "vLLM",
        r"dflashlaguna.*|museglimmer.*",
        reason="it has decoder layers that are not Qwen3's",
    ),
    Architecture(
        "EAGLE-3 of DeepSpec",
        "DeepSpec",
        r"(qwen3|gemma4)eagle3model",
        reason="it has a layout that treespec was not compared with",
    ),
    Architecture("UBTree", "", r"ubtree.*", reason="treespec was not compared with it"),
    Architecture(
        "EAGLE-4",
        "NeMo AutoModel, TokenSpeed",
        r"llamaforcausallmeagle4",
        "eagle4",
        version="NeMo AutoModel's documentation, 26.10; 2026-11-30",
    ),
    Architecture(
        "EAGLE-4 of other layouts",
        "",
        r".*eagle-?4(?!\d).*",
        reason="treespec reads the layout that NeMo AutoModel documents, LlamaForCausalLMEagle4",
    ),
    Architecture(
        "Falcon",
        "",
        r"falcon(spec)?draft.*|semiarfalcon.*",
        reason="it has a semi-autoregressive drafting step",
    ),
    Architecture(
        "PARD, PARD-2",
        "AMD, vLLM, speculators",
        r"pard.*",
        reason=f"{IS_LANGUAGE_MODEL}: name its directory with --drafter pard:DIR",
        version="AMD-AIG-AIMA/PARD 5dfe809; 2026-11-30; not PARD-2's projection of the target's states",
        drafter="pard",
    ),
    Architecture(
        "Independent draft models of speculators",
        "speculators",
        r"independent",
        reason=f"{IS_LANGUAGE_MODEL}: name its directory with --drafter model:DIR",
        drafter="model",
    ),
    Architecture(
        "MLP and LSTM speculators",
        "IBM, Arctic, vLLM",
        r"(arctic)?(mlp|lstm)_?speculator.*",
        reason="it has embeddings and states of its own for each token ahead",
    ),
    Architecture(
        "MTP",
        "speculators, vLLM, SGLang",
        r"mtp|fast_?mtp|.*mtp(draftmodel|model|speculator)?",
        reason="it is a layer of the target: --drafter mtp reads it in the target's files, mtp:DIR in others",
        version="speculators 0.9.0, FastMTP 5875b70; 2026-11-30",
        drafter="mtp",
    ),
    Architecture(
        "Gemma 4's assistant",
        "Google, transformers, vLLM, SGLang",
        r"gemma4(unified)?assistant.*",
        reason="it has no keys and values of its own: it drafts on those of the target's last layers",
    ),
    Architecture(
        "Gumiho", "vLLM", r"gumiho.*", reason="it has serial layers before parallel heads"
    ),
    Architecture(
        "ViSpec",
        "NeMo AutoModel",
        r"vispec.*",
        reason="it has an adaptor for the features of images",
    ),
    Architecture(
        "EAGLE-1 of NeMo AutoModel",
        "NeMo AutoModel",
        r"llamaeagledraftmodel",
        reason="it has a norm before its layer and one behind it",
    ),
    Architecture(
        "EAGLE-3 with latent attention (MLA)",
        "vLLM, SGLang",
        r"eagle3deepseekv[23]forcausallm",
        "eagle3",
        version="vLLM 0359019; 2026-11-30",
    ),
    Architecture(
        "EAGLE-1 and 3 with latent attention (MLA), other layouts",
        "ModelOpt, NeMo AutoModel, vLLM, SGLang",
        r"(eagle3?.*|.*eagle3?)(deepseek|kimi|mistrallarge3).*|(deepseek|kimi).*eagle3?.*",
        reason="it has attention over compressed keys and values",
    ),
    Architecture(
        "EAGLE-1 and 3 with layers of Llama 4 or MiniCPM",
        "vLLM",
        r"eagle3?(llama4|minicpm).*",
        reason="it has rotary positions of neighbours, or scaled embeddings and states",
    ),
    Architecture(
        "EAGLE-3 of several layers in Megatron",
        "ModelOpt",
        r"llamaforcausallmeagle3deep",
        reason="its later layers have a layout that treespec was not compared with",
    ),
    Architecture(
        "P-EAGLE",
        "SpecForge, speculators",
        r"peagle(draftmodel|speculator)?|p-eagle",
        "p-eagle",
    ),
    Architecture(
        "EAGLE-3 and EAGLE-3.1",
        "SafeAILab, SpecForge, SGLang, vLLM, speculators, ModelOpt, NeMo AutoModel, TensorRT-LLM",
        r"eagle3(speculator|draftmodel)?|eagle3(llama|qwen\d(_\dvl)?)forcausallm|llamaforcausallmeagle3|llamaeagle3draftmodel",
        "eagle3",
    ),
    Architecture(
        "EAGLE-1, EAGLE-2, HASS",
        "SafeAILab, SGLang, vLLM, speculators",
        r"eagle(speculator|model)?|eagle.*forcausallm|.*forcausallmeagle",
        "eagle",
    ),
    Architecture(
        "DFlash, JetSpec",
        "z-lab, SpecForge, NeMo AutoModel, ModelOpt, speculators; hao-ai-lab",
        r"(qwen3)?dflash(draftmodel|speculator)?",
        "dflash",
        version="SpecForge 0.2.0, speculators 0.9.0, JetSpec 2c7b3fa; 2026-11-30",
    ),
    Architecture("Medusa", "FasterDecoding, vLLM", r"medusa(model|lmhead.*)?", "medusa"),
    Architecture("Hydra, Hydra++", "zankner", r"hydra(model)?", "hydra"),
)


def find_names(config: Config) -> Iterator[str]:
    """Yield the names that a config.json has for its architecture."""
    architectures = config.get("architectures")
    names: list[object] = []
    if isinstance(architectures, list):
        names += architectures
    names.append(config.get(SPECULATORS_TYPE))
    nested = config.get("dflash_config")
    if isinstance(nested, dict):
        names.append(nested.get("projector_type"))
    names.append(config.get("projector_type"))
    for name in names:
        if isinstance(name, str):  # a file may say anything
            yield name


def find_architecture(name: str) -> Architecture | None:
    """Find the row of an architecture's name; None if it is in no row, such as a target's."""
    for row in KNOWN_ARCHITECTURES:
        if re.fullmatch(row.marks, name, re.IGNORECASE):
            return row
    return None


def check_architecture(config: Config) -> None:
    """Raises ValueError for an architecture that the table knows and treespec does not read."""
    for name in find_names(config):
        row = find_architecture(name)
        if row is not None and not row.kind:
            raise ValueError(f"{name!r} is {row.name}, known, not read yet: {row.reason}")
    kind = config.get(SPECULATORS_TYPE)
    if kind is not None and kind not in SPECULATORS_KINDS:
        kinds = ", ".join(map(repr, SPECULATORS_KINDS))
        raise ValueError(f"{SPECULATORS_TYPE} is {kind!r}: treespec reads {kinds}")
