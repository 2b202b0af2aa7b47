"""How a call is split over a mesh: the plan, and how it runs."""
