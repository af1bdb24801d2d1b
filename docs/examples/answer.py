from treespec import load

spec = load("demo")  # SmolLM2-135M-Instruct, downloaded on first use
question = [{"role": "user", "content": "Why is the sky blue?"}]
answer = spec.generate(question, temperature=0.7, max_new_tokens=64, seed=0)
print(answer.text, answer.stats.acceptance_length, answer.stats.tokens_per_second)
for piece in spec.stream("Once upon a time", max_new_tokens=64):
    print(piece.text, end="", flush=True)
