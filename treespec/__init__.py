"""treespec: lossless tree drafting for causal language models."""
