"""How long tests wait for what has to come: no test asserts a time, it is a hang that shall end before CI gives up."""

PATIENCE_S = 1800.0
