// How this page talks to its server: same origin only, with the API key if there is one.

const KEY = "everserve-key";
const ADMIN_KEY = "everserve-admin-key"; // of requests that change the cluster

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function setAdminKey(key) {
  sessionStorage.setItem(ADMIN_KEY, key);
}

/** fetch, with the key; an error has the words of the server. */
export async function ask(path, { body, signal, isAdmin } = {}) {
  const headers = {};
  const key = (isAdmin && sessionStorage.getItem(ADMIN_KEY)) || sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new ApiError(response.status, said?.error?.message ?? `The server answered ${response.status}.`);
}

/** Server-sent events of a response: the text of each `data:` line. EventSource cannot send a key. */
export async function* dataOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
