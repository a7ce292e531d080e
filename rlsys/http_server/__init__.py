"""HTTP server for all processes: limits on connections, times and bodies; tokens; errors as JSON."""
