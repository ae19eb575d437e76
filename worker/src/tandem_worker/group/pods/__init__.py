"""The processes of the pods of a group: who starts whom, who leads, who follows."""
