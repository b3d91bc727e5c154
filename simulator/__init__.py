"""Sessions, drafts and targets on a simulated clock: the services' own sizer, growers, slots and batching.

`bough simulate` and `python -m loadtest.regret` run the same world (`world`). It may import every service.
"""
