"""Short programs that use Penstock's parts in other people's loops."""
