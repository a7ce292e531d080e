"""Hooks into SGLang's processes: interruption, routed experts, weight buckets, sockets."""
