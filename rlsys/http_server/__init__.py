"""HTTP server of all processes, with limits of connections, times and bodies, and HTTP clients without proxies."""
