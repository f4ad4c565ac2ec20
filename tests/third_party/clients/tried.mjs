// The counterpart of tried.py for the scripts that node runs.

export const URL = process.env.LOOSELEAF_URL
export const TOOLS_URL = process.env.LOOSELEAF_TOOLS_URL
export const MODEL = 'storyteller'

const print = (line) => console.log(JSON.stringify(line))

// Runs a function that must succeed. `remark` is a limit of the client, for the table.
export async function works(what, body, remark = '') {
  let error = null
  try {
    await body()
  } catch (caught) {
    error = caught.stack
  }
  print({ what, remark, refused: false, error })
}

// Runs a function that must throw, because of a limit of the server. The error must contain `message`.
export async function refused(what, message, body, remark = '') {
  let error = 'was not refused: the limit is gone, so mark it as works'
  try {
    await body()
  } catch (caught) {
    const said = `${caught.name}: ${caught.message} ${caught.responseBody ?? ''}`
    error = said.includes(message) ? null : caught.stack
  }
  print({ what, remark, refused: true, error })
}
