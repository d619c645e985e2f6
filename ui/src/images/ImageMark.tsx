// The small mark of an image or a video in a text.
import "./images.css";

export function ImageMark({ name }: { name?: string | undefined }) {
  return (
    <span class="image-mark" data-testid="image-mark">
      <svg viewBox="0 0 16 16" aria-hidden="true">
        <rect x="1.5" y="2.5" width="13" height="11" rx="1.5" />
        <circle cx="5.2" cy="6.2" r="1.2" />
        <path d="M2 12l4-3.5 2.5 2 3-3L14 10" />
      </svg>
      <bdi>{name ?? "image"}</bdi>
    </span>
  );
}
