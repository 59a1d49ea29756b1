"""How a step is computed: model runners, KV pool, attention, linear layers, sampler."""
