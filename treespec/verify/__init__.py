"""Multi-draft verification schemes and the walks over them."""

from dataclasses import fields, replace
from typing import Any

from treespec.errors import InputError
from treespec.verify.greedy import Greedy
from treespec.verify.is_lp import IsLp
from treespec.verify.rrs import RRS
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.single import Single
from treespec.verify.spechub import SpecHub
from treespec.verify.topk import TopK

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (Single(), RRS(), RRSWithoutReplacement(), SpecHub(), Greedy(), IsLp(), TopK())
}
