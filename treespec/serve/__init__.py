"""The server: OpenAI's HTTP API over one engine, and a page to chat on."""
