// Where the host program is: Python stacks as numbers, interned by code object and instruction, described on demand.
#include "sites.hpp"

#include <Python.h>
#include <frameobject.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace sim {
namespace {
constexpr size_t kFrames = 6;  // in a report
constexpr int kDepth = 150;    // looked at

struct Frame {
  PyCodeObject* code;
  int at;  // of an instruction; Python 3.10: a line
};
struct Place {
  std::vector<Frame> frames;
  std::string node;
  Site forward = 0;
};

// All guarded by the GIL, except for `skipped`, which is written once. Code objects are kept for ever.
std::vector<std::string>* skipped = new std::vector<std::string>;
std::vector<std::string>* ends = new std::vector<std::string>;
enum class Show { no, yes, end };  // end: nor what called it
auto* shown = new std::unordered_map<PyCodeObject*, Show>;
auto* places = new std::deque<Place>(1);  // by site; 0 is nowhere
auto* numbers = new std::unordered_map<std::string, Site>;
auto* folder = new std::string;

Show is_shown(PyCodeObject* code) {
  auto it = shown->find(code);
  if (it != shown->end()) return it->second;
  Py_INCREF(code);
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  bool show = file && file[0] != '<';
  if (!file) PyErr_Clear();
  auto from = [&](const std::string& prefix) { return file && !std::strncmp(file, prefix.c_str(), prefix.size()); };
  for (const std::string& prefix : *skipped) show = show && !from(prefix);
  for (const std::string& prefix : *ends)
    if (from(prefix)) return shown->emplace(code, Show::end).first->second;
  show = show || (file && (!std::strcmp(file, "<stdin>") || !std::strcmp(file, "<string>") || !std::strcmp(file, "<program>")));
  return shown->emplace(code, show ? Show::yes : Show::no).first->second;
}

bool python_runs() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

std::string text_of(const Frame& f) {
  const char* file = PyUnicode_AsUTF8(f.code->co_filename);
  const char* name = PyUnicode_AsUTF8(f.code->co_name);
  std::string path = file ? file : "?";
  if (!folder->empty() && path.compare(0, folder->size(), *folder) == 0) {
    path = path.substr(folder->size());
  } else if (size_t last = path.rfind('/'); last != std::string::npos && last > 0) {
    if (size_t parent = path.rfind('/', last - 1); parent != std::string::npos) path = path.substr(parent + 1);
  }
#if PY_VERSION_HEX >= 0x030b0000
  const int line = PyCode_Addr2Line(f.code, f.at);
#else
  const int line = f.at;
#endif
  std::string text = path + ":" + std::to_string(line);
  if (name && name[0] != '<') text += std::string(" in ") + name;
  return text;
}
}  // namespace

WithoutGil::WithoutGil() : saved_(python_runs() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
WithoutGil::~WithoutGil() {
  if (saved_) PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
}

Site python_site(const char* node, Site forward) {
  if (!python_runs() || in_stream_thread()) return 0;
  const PyGILState_STATE state = PyGILState_Ensure();
  std::string key;
  std::vector<Frame> frames;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int depth = 0; frame && depth < kDepth && frames.size() < kFrames; depth++) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const Show show = is_shown(code);
    if (show == Show::end) depth = kDepth;
    if (show == Show::yes) {
#if PY_VERSION_HEX >= 0x030b0000
      frames.push_back({code, PyFrame_GetLasti(frame)});
#else
      frames.push_back({code, PyFrame_GetLineNumber(frame)});
#endif
    }
    Py_DECREF(code);  // `shown` keeps it
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  Site site = 0;
  if (!frames.empty() || node) {
    for (const Frame& f : frames) {
      key.append(reinterpret_cast<const char*>(&f.code), sizeof f.code);
      key.append(reinterpret_cast<const char*>(&f.at), sizeof f.at);
    }
    if (node) {
      key.append(node);
      key.append(reinterpret_cast<const char*>(&forward), sizeof forward);
    }
    const auto [it, added] = numbers->try_emplace(std::move(key), Site(places->size()));
    if (added) places->push_back({std::move(frames), node ? node : "", node ? forward : 0});
    site = it->second;
  }
  PyGILState_Release(state);
  return site;
}

std::string describe_python_site(Site site) {
  if (!site || !python_runs()) return "";
  const PyGILState_STATE state = PyGILState_Ensure();
  std::string text;
  if (site < places->size()) {
    const Place& place = (*places)[site];
    for (const Frame& f : place.frames) text += (text.empty() ? "" : " < ") + text_of(f);
    if (!place.node.empty()) {
      std::string forward;
      if (place.forward && place.forward < places->size())
        for (const Frame& f : (*places)[place.forward].frames) forward += (forward.empty() ? "" : " < ") + text_of(f);
      text += (text.empty() ? "in " : " in ") + place.node;
      if (!forward.empty()) text += ", the backward of " + forward;
    }
  }
  PyGILState_Release(state);
  return text;
}

void skip_frames_of(const std::vector<std::string>& prefixes, const std::vector<std::string>& from_here_up) {
  *skipped = prefixes;
  *ends = from_here_up;
  shown->clear();
  char buffer[4096];
  if (getcwd(buffer, sizeof buffer)) *folder = std::string(buffer) + "/";
}
}  // namespace sim
