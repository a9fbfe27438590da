"""What DiLoCo costs a loop on the steps between synchronisations, and what memory it keeps."""
