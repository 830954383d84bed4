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

// A PNG that is dropped anywhere restores its settings; the browser would open it instead of the page.
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
document.addEventListener("drop", (event) => {
  const input = document.querySelector("#png");
  if (!input || !hasFiles(event)) return;
  event.preventDefault();
  input.files = event.dataTransfer.files;
  input.dispatchEvent(new Event("change", { bubbles: true }));
});

// A download takes the image that the page has already: in the link too, it would be sent twice.
for (const kind of ["click", "contextmenu"]) {
  document.addEventListener(kind, (event) => {
    const link = event.target.closest?.(".card .download");
    if (link) link.href = link.closest(".card").querySelector("img").src;
  }, true);
}
