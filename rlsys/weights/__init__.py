"""Weight updates, trainer side: senders and receivers, transports, hashes."""
