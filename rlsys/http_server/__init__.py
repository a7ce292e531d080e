"""The HTTP server of every entry point: limits on connections, times and bodies, tokens, and errors as JSON."""
