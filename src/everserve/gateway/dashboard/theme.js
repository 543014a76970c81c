// Before anything is drawn: the theme that was chosen here, or none, and then the system's counts.
const chosen = localStorage.getItem("everserve-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
