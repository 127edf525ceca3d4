"""What ``penstock bench`` measures, a file per subject: contestants in turn, rows, a table and a picture.

It uses the package as a person would. It must not be imported by anything but its command and its tests."""
