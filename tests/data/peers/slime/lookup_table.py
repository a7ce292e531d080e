"""What lies beside a function can be imported by it."""

TABLE = {"3+4": 7, "2+2": 4}


def look_up(asked):
    return TABLE.get(asked.strip(), 0)
