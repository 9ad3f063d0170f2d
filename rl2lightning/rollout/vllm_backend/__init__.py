"""All that touches vLLM: nothing else imports `vllm`."""
