"""The learner: turns batches of samples into new versions of the weights."""
