"""The process of one data-parallel rank: which engine it runs, and the scheduler in front of the model."""
