"""The template of a job: types of the fields that the operator reads, isolation, and the grace period."""
