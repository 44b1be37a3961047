"""How one training is spread over processes: the choice of a mode (`sharding_mode`) and a strategy for each kind."""
