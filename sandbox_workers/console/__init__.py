"""Running a recorded session again: what the log holds of its calls, and the comparison (`turnlog log session`)."""
