"""How a response is made: single turns, tools, agents, environments, trees, functions; and the boundary that
censors a failed sample.
"""
