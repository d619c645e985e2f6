// Pictures in a row, each opened by a click; with a button that removes it where it is not sent yet.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Dialog } from "../app/Dialog";
import { count } from "../charts/numbers";
import { imageOf, isLost, isWithoutRoom } from "./kept";
import { titleOfImage, type ShownImage } from "./picture";
import "./images.css";

interface Props {
  label: string;
  images: readonly ShownImage[];
  /** With the sentences about size. */
  isNoted?: boolean;
  onRemove?: (image: ShownImage) => void;
}

export function Thumbnails({ label, images, isNoted = false, onRemove }: Props) {
  const open = useSignal<ShownImage | null>(null);
  if (images.length === 0) return null;
  return (
    <>
      <ul class="thumbnails" aria-label={label} data-testid="thumbnails">
        {images.map((image) => (
          <li key={image.source} class={isLost(image) ? "is-lost" : ""} data-testid="thumbnail">
            <div class="thumbnail-frame">
              <button
                type="button"
                class="thumbnail"
                aria-label={`Show ${titleOfImage(image)}`}
                title={titleOfImage(image)}
                onClick={() => (open.value = image)}
              >
                <img src={image.thumbnail} alt="" />
              </button>
              {onRemove && (
                <button type="button" class="tool remove" aria-label={`Remove ${image.name}`} onClick={() => onRemove(image)}>
                  ×
                </button>
              )}
            </div>
            <Notes image={image} isNoted={isNoted} />
          </li>
        ))}
      </ul>
      <Dialog
        title={open.value?.name ?? "Image"}
        className="image-dialog"
        isOpen={open.value !== null}
        onClose={() => (open.value = null)}
      >
        {open.value && <Large image={open.value} />}
      </Dialog>
    </>
  );
}

function Notes({ image, isNoted }: { image: ShownImage; isNoted: boolean }) {
  const notes: string[] = [];
  if (isNoted && image.scaledFrom) {
    const [width, height] = image.scaledFrom;
    notes.push(`Scaled from ${count(width)} × ${count(height)} to ${count(image.width)} × ${count(image.height)}`);
  }
  if (isLost(image)) notes.push("Lost with the reload");
  else if (isWithoutRoom(image)) notes.push("Not kept for a reload: there is no more room");
  return (
    <>
      {notes.map((note) => (
        <small key={note} class="hint">
          {note}
        </small>
      ))}
    </>
  );
}

/** Its kind may be another than that of the file that was chosen. */
function fileNameOf({ name, source }: ShownImage): string {
  const kind = imageOf(source)?.mediaType.replace("image/", "").replace("jpeg", "jpg") ?? "";
  return `${name.replace(/\.\w+$/, "")}.${kind}`;
}

/** The picture as the model gets it. */
function Large({ image }: { image: ShownImage }) {
  const address = useSignal("");
  useEffect(() => {
    const made = imageOf(image.source);
    if (!made?.data) return;
    const url = URL.createObjectURL(new Blob([made.data as Uint8Array<ArrayBuffer>], { type: made.mediaType }));
    address.value = url;
    return () => URL.revokeObjectURL(url);
  }, [image]);
  return (
    <>
      <img class="large-image" src={address.value || image.thumbnail} alt={image.name} />
      <div class="row">
        <span class="hint">
          {titleOfImage(image)}
          {isLost(image) && ". Only this thumbnail was kept."}
        </span>
        {address.value && (
          <a href={address.value} download={fileNameOf(image)}>
            Save
          </a>
        )}
      </div>
    </>
  );
}
