// Images: files, whose bytes a session uploads once, and URLs, which the model's provider fetches.

import { bytesOfBase64, toBase64 } from "./base64.js";
import { BadArgument } from "./errors.js";
import { MAX_IMAGE_BYTES } from "./protocol.js";
import { sha256 } from "./sha256.js";

const DIGEST = "sha256:";
const MAX_URL_CHARS = 8000;

/** What `image` accepts: a file, its bytes, a `data:` URL with a file, or an `https:` URL. */
export type ImageSource = Blob | ArrayBuffer | ArrayBufferView | URL | string;

/** An image, which can be appended to states and graphs of any session. `image` makes it. */
export class Image {
  /** @internal */
  constructor(
    /** `sha256:` and the digest of a file in hexadecimal digits, or an `https:` URL. */
    readonly source: string,
    /** Of a file, such as `image/png`; of a URL empty. */
    readonly mediaType = "",
    /** The bytes of a file. */
    readonly data?: Uint8Array | undefined,
  ) {}

  /** A `data:` URL that contains the file, or the URL of the image. */
  get url(): string {
    return this.data ? `data:${this.mediaType};base64,${toBase64(this.data)}` : this.source;
  }
}

// The files in use: the same bytes are the same object.
const files = new Map<string, WeakRef<Image>>();
const gone = new FinalizationRegistry<string>((source) => {
  if (!knownFile(source)) files.delete(source);
});

/** @internal The file with this source, if something uses it. */
export function knownFile(source: string): Image | undefined {
  return files.get(source)?.deref();
}

/**
 * An image for a turn of the user, or for the result of a tool. Rejects with `BadArgument` if it is no PNG, JPEG,
 * GIF or WebP file, is larger than 20 MB, or has another URL than `https:` and `data:`.
 */
export async function image(source: ImageSource): Promise<Image> {
  if (typeof source === "string" || source instanceof URL) {
    const url = String(source);
    return url.startsWith("data:") ? fileOf(bytesOfDataUrl(url)) : imageAt(url);
  }
  if (source instanceof Blob) {
    checkSize(source.size);
    return fileOf(new Uint8Array(await source.arrayBuffer()));
  }
  // A copy: the caller may change the bytes later.
  if (ArrayBuffer.isView(source)) {
    checkSize(source.byteLength);
    return fileOf(new Uint8Array(source.buffer, source.byteOffset, source.byteLength).slice());
  }
  if (source instanceof ArrayBuffer) {
    checkSize(source.byteLength);
    return fileOf(new Uint8Array(source).slice());
  }
  throw new BadArgument("image: give a file, its bytes, or a URL");
}

/** @internal The image at an `https:` URL. */
export function imageAt(url: string): Image {
  if (!url.startsWith("https:")) {
    throw new BadArgument(
      `image: a URL must begin with https:, or with data:image/…;base64, unlike ${JSON.stringify(url.slice(0, 40))}`,
    );
  }
  if (url.length > MAX_URL_CHARS) throw new BadArgument(`image: a URL has ${MAX_URL_CHARS} characters at most`);
  return new Image(url);
}

function bytesOfDataUrl(url: string): Uint8Array {
  const [head, body] = [url.slice(0, url.indexOf(",")), url.slice(url.indexOf(",") + 1)];
  if (!head.startsWith("data:image/") || !head.endsWith(";base64")) {
    throw new BadArgument("image: a data: URL must begin with data:image/…;base64,");
  }
  checkSize(Math.floor((body.length * 3) / 4) - 2);
  try {
    return bytesOfBase64(body);
  } catch {
    throw new BadArgument("image: this is no valid base64");
  }
}

async function fileOf(data: Uint8Array): Promise<Image> {
  checkSize(data.length);
  const mediaType = mediaTypeOf(data);
  const source = DIGEST + (await sha256(data));
  const known = knownFile(source);
  if (known) return known;
  const made = new Image(source, mediaType, data);
  files.set(source, new WeakRef(made));
  gone.register(made, source);
  return made;
}

function checkSize(numBytes: number): void {
  if (numBytes > MAX_IMAGE_BYTES) {
    throw new BadArgument(`image: ${numBytes} bytes are more than ${MAX_IMAGE_BYTES}: make it smaller`);
  }
}

/** The media type by the first bytes. */
function mediaTypeOf(data: Uint8Array): string {
  const start = String.fromCharCode(...data.subarray(0, 12));
  if (start.startsWith("\x89PNG\r\n")) return "image/png";
  if (start.startsWith("\xff\xd8\xff")) return "image/jpeg";
  if (start.startsWith("GIF8")) return "image/gif";
  if (start.startsWith("RIFF") && start.slice(8) === "WEBP") return "image/webp";
  throw new BadArgument("image: the file is no image of a known kind: PNG, JPEG, GIF and WebP are supported");
}
