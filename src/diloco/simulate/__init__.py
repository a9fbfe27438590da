"""What a link will cost, before anything is rented: the compute-utilisation simulator and the planner."""
