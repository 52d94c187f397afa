"""`vllm-hisparse doctor`: checks the machine that a server will run on, and measures what decides its speed."""
