"""`MultiConnector`: several connectors in one engine, for example pull and offloading.

`lookup`, `transfers` and `requests` decide and are pure: which child loads which tokens, what one
rank still waits for, and what each request owes its children. `children` calls the children and
isolates those that fail. `scheduler` and `worker` are the two roles, shared by the embedded engine
(`connector`) and by vLLM (`kvferry.vllm.multi`). See docs/decisions/053-multi-connector.md.
"""
