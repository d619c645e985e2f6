// A picture that was chosen, dropped or pasted: made small enough to send, with a thumbnail to show.
import { image, type Image } from "agentflow-client";
import { count } from "../charts/numbers";

/** A picture as the page shows it: plain data, also where its bytes are gone. */
export interface ShownImage {
  /** Of the client's image. */
  readonly source: string;
  readonly name: string;
  readonly width: number;
  readonly height: number;
  /** The width and height of the file, if it was scaled down. */
  readonly scaledFrom?: readonly [width: number, height: number];
  /** A `data:` URL. */
  readonly thumbnail: string;
}

/** Models see larger pictures scaled down. */
export const MAX_SIDE = 2048;
/** Larger files are encoded again. */
const MAX_BYTES = 4_000_000;
const MAX_FILE_BYTES = 100_000_000;
const THUMBNAIL_SIDE = 240;
const SENT_TYPES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);

/** Reads a picture. Throws an error whose message is a sentence for the user. */
export async function readPicture(file: File): Promise<[ShownImage, Image]> {
  const name = nameOf(file);
  if (file.size > MAX_FILE_BYTES) throw new Error(`${name} is larger than 100 MB.`);
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${name} cannot be read as an image.`);
  }
  try {
    const { width, height } = bitmap;
    const size = fitted(width, height, MAX_SIDE);
    const isScaled = size[0] !== width || size[1] !== height;
    const isSent = SENT_TYPES.has(file.type) && file.size <= MAX_BYTES && !isScaled;
    const made = await image(isSent ? file : await encoded(bitmap, size, typeFor(file.type), 0.9));
    const small = await encoded(bitmap, fitted(width, height, THUMBNAIL_SIDE), "image/webp", 0.8);
    const shown: ShownImage = {
      source: made.source,
      name,
      width: size[0],
      height: size[1],
      thumbnail: (await image(small)).url,
      ...(isScaled ? { scaledFrom: [width, height] as const } : {}),
    };
    return [shown, made];
  } finally {
    bitmap.close();
  }
}

/** The size within a square, with the same ratio. */
export function fitted(width: number, height: number, side: number): [number, number] {
  const by = Math.min(1, side / Math.max(width, height));
  return [Math.max(1, Math.round(width * by)), Math.max(1, Math.round(height * by))];
}

/** WebP has transparency, and is smaller than PNG. A browser that cannot write it writes PNG. */
function typeFor(type: string): string {
  return type === "image/jpeg" ? type : "image/webp";
}

async function encoded(bitmap: ImageBitmap, [width, height]: [number, number], type: string, quality: number): Promise<Blob> {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d")!;
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.convertToBlob({ type, quality });
}

/** Pasted pictures all have the same name, and others perhaps a long one. */
function nameOf(file: File): string {
  const name = file.name.toWellFormed().replace(/\s+/g, " ").trim();
  if (!name) return "image";
  return name.length > 60 ? `${name.slice(0, 40).toWellFormed()}…${name.slice(-15).toWellFormed()}` : name;
}

/** `photo.jpg, 640 × 480`. */
export function titleOfImage({ name, width, height }: ShownImage): string {
  return `${name}, ${count(width)} × ${count(height)}`;
}
