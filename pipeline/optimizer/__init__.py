"""Gradients and updates: optimizers by stage, loss scale, clip, and the checks of optimizer states.

One optimizer per stage must do what one over all parameters does; what cannot be split so is refused here.
It must not know schedules, frames or how stages were cut, nor who asked for the run."""
