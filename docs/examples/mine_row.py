"""`Mine` and `Whole` as rows of the table of verifiers. It loads no torch, as `treespec --help` reads it."""

from treespec.verify.facts import SCHEME_INFOS, SchemeInfo, VerifierInfo

MINE = SchemeInfo("mine", loads="verifier:Mine", max_draws=1)
WHOLE = VerifierInfo("whole", SCHEME_INFOS["single"], loads="whole:Whole")
if __name__ == "__main__":
    print(MINE, WHOLE)
