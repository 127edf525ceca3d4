"""One bounded cache of samples for the training jobs of a machine.

It knows orders of samples, bytes and clocks. It must not know networks, ranks or what a sample means."""
