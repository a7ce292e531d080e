"""Weight updates, trainer side: who sends what to whom, transports, hashes."""
