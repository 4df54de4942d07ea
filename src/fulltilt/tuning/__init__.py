"""Finding better settings: live while a job trains, and in trials."""
