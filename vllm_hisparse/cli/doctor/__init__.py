"""`vllm-hisparse doctor`: checks the machine on which a server will run, and measures rates that decide its speed."""
