// The interface of a backend, and the table in which each backend enters itself. A new one is one file in cpp/src: a
// subclass of Backend and a RegisteredBackend. Python reads the table, so no other file names a backend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "zero_nvme/transfer.hpp"

namespace zero_nvme {

// A way to have transfers done. All but wake() is called from one thread, the path's I/O thread; the constructor
// may run elsewhere. Constructors throw std::system_error naming the call.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void begin() {}
  // Called when no transfer is in flight. Releases the kernel's references to the file before it returns.
  virtual void end() {}
  // Takes a transfer; it may be handed to the kernel as late as the next wait(). At most `depth` at a time.
  virtual void start(Transfer* transfer) = 0;
  // Submits the started transfers, blocks until one completes or wake() is called, and appends the completions.
  virtual void wait(std::vector<Completion>& completed) = 0;
  // Makes the current or the next wait() return. From any thread.
  virtual void wake() = 0;
  virtual bool registered_file() const { return false; }
  // Called in a forked child: closes its copies of the descriptors and joins no threads.
  virtual void close_in_child() noexcept {}
};

struct BackendArguments {
  int fd;            // of the path
  unsigned depth;    // the most transfers at a time
  unsigned threads;  // for a backend that has some
};

// An entry of the table. Define one at namespace scope in the backend's own file:
//
//   const RegisteredBackend registered("sync", 40, [](const BackendArguments&) -> std::unique_ptr<Backend> {
//     return std::make_unique<SyncBackend>();
//   });
//
// `auto` tries the entries by `place`, the smallest first.
struct RegisteredBackend {
  using Make = std::unique_ptr<Backend> (*)(const BackendArguments&);

  RegisteredBackend(const char* name, int place, Make make);

  const char* name;
  int place;
  Make make;
};

// All entries, in the order in which `auto` tries them.
const std::vector<RegisteredBackend>& backends();

// Throws std::invalid_argument if no entry has this name.
std::unique_ptr<Backend> make_backend(const std::string& name, const BackendArguments& arguments);

}  // namespace zero_nvme
