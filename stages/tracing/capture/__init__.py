"""From a model to the nodes of one real eager run; knows torch's dispatch, no stages, plans or ranks."""
