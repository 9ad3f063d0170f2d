"""All that touches vLLM itself; nothing else imports it."""
