"""What a user asks of a plan: explain, dump, doctor."""
