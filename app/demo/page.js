// Enlarges an image in a native dialog: Escape closes it and the focus returns.
document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".card .zoom");
  if (!button) return;
  const picture = button.querySelector("img");
  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  dialog.setAttribute("aria-label", picture.alt);
  const close = document.createElement("button");
  close.type = "button";
  close.textContent = "Close";
  const large = document.createElement("img");
  large.src = picture.src;
  large.alt = picture.alt;
  dialog.append(large, close);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
});
