"""`Mine` as a row of the table of verifiers. It loads no torch, as `treespec --help` reads it."""

from treespec.verify.facts import SchemeInfo

MINE = SchemeInfo("mine", loads="verifier:Mine", max_draws=1)
if __name__ == "__main__":
    print(MINE)
