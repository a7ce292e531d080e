"""One SGLang server: launch arguments, client, wire format, and our plug-ins inside it."""
