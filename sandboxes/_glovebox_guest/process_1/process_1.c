/* Process 1 of a warm sandbox, in C: a fork of the zygote that never runs the interpreter, so none of its memory is
 * copied. It isolates and measures itself, forks the program's process, passes on what that prints, enforces limits and
 * reports the end. It interprets nothing that a program wrote.
 *
 * Two kinds of processes return from glovebox_serve into the interpreter: the program's, before there is a program; and
 * helpers, for what has to parse or to look into folders: they receive inputs, and collect /output when all processes
 * of the program are dead. All are forked from memory that no byte of a program's has reached.
 *
 * Steps, order and reasons are those of zygote.py, main.py and work.py. See clone(2), {user,mount,pid}_namespaces(7),
 * capabilities(7), seccomp(2), prctl(2), proc(5). */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "wire.h"

enum { WIRE = 10, ORDER = 5, MOST_FDS = 8, CHUNK = 64 << 10 };
enum { PROGRAM, RECEIVE, COLLECT };
enum { UTIME = 10, CUTIME = 12, CMINFLT = 7, FIELDS = 14 }; /* behind the state in /proc/PID/stat */
/* Rights of landlock.py; the headers of some systems lack the newer ones. */
enum {
    READ_DIR = 1 << 3, READ = 1 << 0 | 1 << 2 | READ_DIR, WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8,
    MAKE = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12, REFER = 1 << 13, TRUNCATE = 1 << 14,
    FOR_FILES = 1 << 0 | 1 << 1 | 1 << 2 | TRUNCATE, SCOPES = 1 << 0 | 1 << 1, QUIET = 1 << 0 | 1 << 2,
};
#define SECOND INT64_C(1000000000)
#define DRAIN (2 * SECOND)
#define LOOK (SECOND / 4)
#define NEW_NAMESPACES (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

/* What every fork needs of the plan; made once in the zygote, and read only since. Lists end with an empty string. */
static struct {
    const char *tmpfs, *hidden, *masked, *python, *output;
    struct sock_fprog filter, program_filter;
} plan;

/* What the program's process reads of the job for us, before the program runs; process_1/__init__.py has the order. */
struct limits {
    int64_t inputs, wall_us, cpu_seconds, printed_bytes, output_bytes, output_files;
};

/* What a process gets that returns into the interpreter, in the same way. */
struct handed {
    int64_t role, wire, last, deadline, stopped, status, wall_us, cpu_us, peak_bytes;
    struct limits limits;
};

struct relay {
    const char *kind;
    int64_t room;
    int descriptor; /* -1 once it is closed */
    bool over;      /* it printed more than it may */
};

/* The program's process, the pipe of its order and that of its end, and where the ends of processes are reported. */
static struct { pid_t pid; int order, done, ended; } program;
static struct wire wire;
static struct relay relays[STREAMS] = {{"stdout", 0, -1, false}, {"stderr", 0, -1, false}, {"result", 0, -1, false}};
static struct { size_t held; uint8_t bytes[CHUNK * 3]; } out;

/* Without it the sandbox ends; the host passes the words on, with the last error of a system call. */
static void require(bool holds, const char *what) {
    if (holds) return;
    dprintf(2, "process 1: %s: %s", what, strerror(errno));
    _exit(1);
}
static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

/* ------------------------------------------------------------------ isolation */
static void put(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    require(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text), path);
    close(file);
}

/* Empty all five sets, for good. */
static void drop_capabilities(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    const struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
    int capability = 0;
    /* The kernel refuses the first one that it does not have. */
    while (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0) capability++;
    require(errno == EINVAL, "prctl(PR_CAPBSET_DROP)");
    require(syscall(SYS_capset, &header, none) == 0, "capset");
}

/* Set up file systems, network and rights of this sandbox alone: zygote._isolate. */
static void isolate(void) {
    require(setsid() != -1, "setsid");
    require(mount("none", "/", "", MS_REC | MS_PRIVATE, "") == 0, "mount(MS_PRIVATE)");
    require(mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "") == 0, "/proc");
    const char *const terminals = "newinstance,ptmxmode=0666,mode=620";
    require(mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals) == 0, "/dev/pts");
    for (const char *target = plan.tmpfs; *target;) {
        const char *data = target + strlen(target) + 1;
        require(mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, data) == 0, target);
        target = data + strlen(data) + 1;
    }
    struct ifreq loopback = {.ifr_name = "lo"};
    int network = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    require(network >= 0 && ioctl(network, SIOCGIFFLAGS, &loopback) == 0, "SIOCGIFFLAGS");
    loopback.ifr_flags |= IFF_UP;
    require(ioctl(network, SIOCSIFFLAGS, &loopback) == 0, "SIOCSIFFLAGS");
    close(network);
    put("/proc/sys/user/max_user_namespaces", "0");
    drop_capabilities();
}

static void send_pidfd(void) {
    char space[CMSG_SPACE(sizeof(int))] = {0}, byte = '0';
    struct iovec content = {&byte, 1};
    struct msghdr message = {.msg_iov = &content, .msg_iovlen = 1, .msg_control = space};
    message.msg_controllen = sizeof space;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    require(pidfd >= 0, "pidfd_open");
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof pidfd);
    memcpy(CMSG_DATA(header), &pidfd, sizeof pidfd);
    require(sendmsg(0, &message, 0) == 1, "sendmsg");
    close(pidfd);
}

/* Leave what this process shares with the zygote, up to the seccomp filter: zygote._leave and main.serve. */
static void leave(const int *given, int count, unsigned inside, unsigned outside) {
    char map[64];
    /* Given are the wire, a file for errors, and the entrances of control groups; all above 2, as 0 to 2 are open. */
    require(dup2(given[1], 2) == 2 && dup2(given[0], 0) == 0, "dup2");
    for (int group = 2; group < count; group++) require(write(given[group], "0", 1) == 1, "a control group");
    require(syscall(SYS_close_range, 3, ~0U, 0) == 0, "close_range");
    require(unshare(CLONE_NEWCGROUP) == 0, "unshare");
    send_pidfd();
    require(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0, "PR_SET_DUMPABLE");
    put("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "%u %u 1", inside, outside);
    put("/proc/self/uid_map", map);
    put("/proc/self/gid_map", map);
    isolate();
    require(getpid() == 1, "it is not process 1");
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    require(fcntl(0, F_DUPFD_CLOEXEC, WIRE) == WIRE && null >= 0 && dup2(null, 0) == 0 && dup2(null, 1) == 1, "dup2");
    close(null);
    require(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0, "PR_SET_DUMPABLE");
    require(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &plan.filter, 0, 0) == 0, "PR_SET_SECCOMP");
}

/* ------------------------------------------------------------------ the wire */
static void write_all(int descriptor, const void *bytes, size_t length) {
    const char *at = bytes;
    while (length) {
        ssize_t written = write(descriptor, at, length);
        if (written <= 0) /* the host is gone, and the sandbox goes with process 1 */
            _exit(1);
        at += written;
        length -= (size_t)written;
    }
}
static void read_all(int descriptor, void *bytes, size_t length) {
    char *at = bytes;
    while (length) {
        ssize_t got = read(descriptor, at, length);
        if (got <= 0) _exit(1);
        at += got;
        length -= (size_t)got;
    }
}
static void flush(void) {
    write_all(WIRE, out.bytes, out.held);
    out.held = 0;
}

/* Return where a payload of up to this many bytes goes, for ``add_frame``. */
static uint8_t *room_for(size_t length) {
    if (out.held + HEADER + length > sizeof out.bytes) flush();
    return out.bytes + out.held + HEADER;
}
static void put_header(uint8_t *at, uint8_t type, uint32_t stream, uint32_t length) {
    const uint32_t words[2] = {stream, length};
    at[0] = type;
    for (int word = 0; word < 2; word++)
        for (int byte = 0; byte < 4; byte++) at[1 + word * 4 + byte] = (uint8_t)(words[word] >> (24 - 8 * byte));
}
static void add_frame(uint8_t type, uint32_t stream, size_t length) {
    put_header(out.bytes + out.held, type, stream, (uint32_t)length);
    out.held += HEADER + length;
}

/* Receive once, waiting for it, and take what is whole. */
static void receive(void) {
    ssize_t got = read(WIRE, wire.bytes + wire.held, sizeof wire.bytes - wire.held);
    if (got <= 0) _exit(1);
    wire.held += (size_t)got;
    require(take_frames(&wire), "the host broke the wire's protocol");
}

/* ------------------------------------------------------------------ measuring */
static struct { size_t length; char bytes[160 << 10]; } found;

/* Add a part to what was found. It ends with a zero byte, which no part has in it. */
static __attribute__((format(printf, 1, 2))) void add(const char *format, ...) {
    va_list words;
    va_start(words, format);
    const size_t room = sizeof found.bytes - found.length;
    const int length = vsnprintf(found.bytes + found.length, room, format, words);
    va_end(words);
    require(length >= 0 && (size_t)length < room, "its measurement is too long");
    found.length += (size_t)length + 1;
}

/* Read a file that is shorter than ``most``: its length, or -1. A zero byte follows. */
static ssize_t read_file(const char *path, char *bytes, size_t most) {
    size_t length = 0;
    ssize_t got = -1;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    while (file >= 0 && length < most && (got = read(file, bytes + length, most - length)) > 0) length += (size_t)got;
    if (file >= 0) close(file);
    if (got != 0) return -1;
    bytes[length] = '\0';
    return (ssize_t)length;
}

static void add_file(const char *path) {
    const ssize_t length = read_file(path, found.bytes + found.length, sizeof found.bytes - found.length);
    require(length >= 0, path);
    found.length += (size_t)length + 1;
}

/* Whether a folder has entries; ``unknown`` if it cannot be listed. */
static bool holds_anything(const char *path, bool unknown) {
    bool entries = false;
    DIR *folder = opendir(path);
    if (folder == NULL) return unknown;
    for (struct dirent *entry; (entry = readdir(folder));)
        entries |= strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(folder);
    return entries;
}

/* Whether a file has readable content, or a folder (named with a slash at its end) entries: measure._readable. */
static bool readable(const char *path) {
    char byte;
    if (path[strlen(path) - 1] == '/') return holds_anything(path, false);
    const int file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    const bool content = file >= 0 && read(file, &byte, 1) == 1;
    if (file >= 0) close(file);
    return content;
}

/* Add the number of each open descriptor that is none of our own. */
static void add_descriptors(void) {
    const int own[] = {WIRE, program.order, program.done, program.ended, relays[STDOUT].descriptor,
                       relays[STDERR].descriptor, relays[RESULT].descriptor};
    DIR *folder = opendir("/proc/self/fd");
    require(folder != NULL, "/proc/self/fd");
    for (struct dirent *entry; (entry = readdir(folder));) {
        const int number = atoi(entry->d_name);
        bool known = number <= 2 || number == dirfd(folder);
        for (size_t each = 0; each < sizeof own / sizeof *own; each++) known |= number == own[each];
        if (!known) add("%d", number);
    }
    closedir(folder);
}

/* Report ``ready`` with texts of which measure.told makes a measurement. */
static void report_ready(void) {
    static const char *const namespaces[] = {"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"};
    static const char begin[] = "{\"kind\":\"ready\",\"body\":{\"texts\":\"", end[] = "\"}}";
    static const char digits[] = "0123456789abcdef";
    static uint8_t frame[HEADER + sizeof begin + sizeof end + 6 * sizeof found.bytes];
    struct utsname name;
    struct stat status;
    add_file("/proc/self/status");
    add_file("/proc/self/mountinfo");
    add_file("/proc/self/net/dev");
    for (size_t each = 0; each < sizeof namespaces / sizeof *namespaces; each++) {
        char path[64], link[64];
        snprintf(path, sizeof path, "/proc/self/ns/%s", namespaces[each]);
        const ssize_t length = readlink(path, link, sizeof link);
        require(length > 0, path);
        add("%.*s", (int)length, link);
    }
    add("%d %d %d %ld %d", getpid(), prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), prctl(PR_GET_DUMPABLE, 0, 0, 0, 0),
        syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION),
        access("/proc/sentry-meminfo", F_OK) == 0);
    require(uname(&name) == 0, "uname");
    const char *const words[] = {name.nodename, name.sysname, name.release, name.version, plan.python};
    for (size_t each = 0; each < sizeof words / sizeof *words; each++) add("%s", words[each]);
    add_descriptors();
    add("%s", ""); /* between the two lists */
    for (const char *path = plan.hidden; *path; path += strlen(path) + 1)
        if (lstat(path, &status) == 0) add("%s", path);
    for (const char *path = plan.masked; *path; path += strlen(path) + 1)
        if (readable(path)) add("%s", path);
    /* As a JSON string in which each byte is one character; the host turns it back. */
    uint8_t *at = memcpy(frame + HEADER, begin, sizeof begin - 1);
    at += sizeof begin - 1;
    for (size_t each = 0; each < found.length; each++) {
        const unsigned char byte = (unsigned char)found.bytes[each];
        if (byte < 0x20 || byte > 0x7e || byte == '"' || byte == '\\') {
            const char code[] = {'\\', 'u', '0', '0', digits[byte >> 4], digits[byte & 15]};
            memcpy(at, code, sizeof code);
            at += sizeof code;
        } else {
            *at++ = byte;
        }
    }
    memcpy(at, end, sizeof end - 1);
    at += sizeof end - 1;
    put_header(frame, MESSAGE, 0, (uint32_t)(at - frame - HEADER));
    write_all(WIRE, frame, (size_t)(at - frame));
}

/* ------------------------------------------------------------------ processes */
/* The columns of /proc/PID/stat behind the state: work._fields. The command may hold spaces and brackets. */
static bool columns(const char *pid, uint64_t *fields) {
    char path[300], text[2048];
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    if (read_file(path, text, sizeof text) < 0) return false;
    char *at = strrchr(text, ')');
    if (at == NULL || strlen(at) < 4) return false;
    at += 3; /* a bracket, a blank and the state */
    for (int each = 0; each < FIELDS; each++) {
        char *after;
        fields[each] = strtoull(at, &after, 10);
        if (after == at) return false;
        at = after;
    }
    return true;
}

static int64_t reaped_us(void) {
    struct rusage spent;
    getrusage(RUSAGE_CHILDREN, &spent);
    return (spent.ru_utime.tv_sec + spent.ru_stime.tv_sec) * INT64_C(1000000) + spent.ru_utime.tv_usec +
           spent.ru_stime.tv_usec;
}
static int64_t clock_us(pid_t pid) {
    struct timespec time;
    if (clock_gettime((clockid_t)(~(unsigned)pid << 3 | 2), &time) != 0) return 0; /* as clock_getcpuclockid(3) */
    return time.tv_sec * INT64_C(1000000) + time.tv_nsec / 1000;
}
static bool is_number(const char *name) {
    return *name && strspn(name, "0123456789") == strlen(name);
}

/* Microseconds of all other processes here and of all reaped ones: work._processor_seconds. */
static int64_t processor_us(void) {
    const int64_t tick = 1000000 / sysconf(_SC_CLK_TCK);
    int64_t total = reaped_us();
    DIR *folder = opendir("/proc");
    uint64_t fields[FIELDS];
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (is_number(entry->d_name) && strcmp(entry->d_name, "1") != 0 && columns(entry->d_name, fields))
            for (int each = UTIME; each < UTIME + 4; each++) total += (int64_t)fields[each] * tick;
    if (folder) closedir(folder);
    return total;
}

/* Whether the process is alone and had no children: then its time and its peak of memory, as work._of_one_alone. */
static bool of_one_alone(pid_t pid, int64_t *cpu_us, int64_t *peak_bytes) {
    char name[32], path[64], text[8192];
    uint64_t fields[FIELDS];
    int others = 0, found = 0;
    snprintf(name, sizeof name, "%d", pid);
    DIR *folder = opendir("/proc");
    if (folder == NULL) return false;
    for (struct dirent *entry; (entry = readdir(folder));) {
        const bool is_it = strcmp(entry->d_name, name) == 0;
        found += is_it;
        others += is_number(entry->d_name) && !is_it && strcmp(entry->d_name, "1") != 0;
    }
    closedir(folder);
    if (others || !found || !columns(name, fields)) return false;
    const int64_t spent = clock_us(pid);
    if (spent == 0 || fields[CMINFLT] || fields[CUTIME] || fields[CUTIME + 1]) return false;
    snprintf(path, sizeof path, "/proc/%s/status", name);
    if (read_file(path, text, sizeof text) < 0) return false;
    const char *peak = strstr(text, "\nVmHWM:"); /* no name of a process has a line break here, see proc(5) */
    if (peak == NULL) return false;
    *cpu_us = reaped_us() + spent;
    *peak_bytes = strtoll(peak + 7, NULL, 10) * 1024;
    return true;
}

/* Reap the orphans that process 1 inherits, but not the program. */
static void reap_orphans(pid_t pid) {
    for (siginfo_t found;;) {
        found.si_pid = 0;
        if (waitid(P_ALL, 0, &found, WEXITED | WNOHANG | WNOWAIT) != 0 || found.si_pid == 0 || found.si_pid == pid)
            return;
        waitpid(found.si_pid, NULL, 0);
    }
}

/* ------------------------------------------------------------------ the program */
/* Make /output write-only for this process and its children: landlock.py says which rights and why. */
static void grant(int ruleset, const char *path, uint64_t rights) {
    struct stat status;
    const int place = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    require(place >= 0 && fstat(place, &status) == 0, path);
    struct landlock_path_beneath_attr rule = {S_ISDIR(status.st_mode) ? rights : rights & FOR_FILES, place};
    /* A link is resolved when it is used: its target is granted, or not, under its own name. */
    if (!S_ISLNK(status.st_mode))
        require(syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) == 0, path);
    close(place);
}

static void confine(void) {
    static const char *const writable[] = {"/dev/shm",  "/tmp",        "/dev/full", "/dev/null",
                                           "/dev/random", "/dev/urandom", "/dev/zero"};
    const long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    require(abi > 0, "landlock_create_ruleset");
    const uint64_t move = abi >= 2 ? REFER : 0, change = WRITE | (abi >= 3 ? TRUNCATE : 0);
    const uint64_t attributes[3] = {READ | change | MAKE | move, 0, abi >= 6 ? SCOPES : 0};
    const int ruleset = (int)syscall(SYS_landlock_create_ruleset, attributes, abi >= 6 ? sizeof attributes : 8, 0);
    DIR *top = opendir("/");
    require(ruleset >= 0 && top != NULL, "landlock_create_ruleset");
    for (struct dirent *entry; (entry = readdir(top));) {
        char path[300];
        snprintf(path, sizeof path, "/%s", entry->d_name);
        if (strcmp(path, "/.") == 0 || strcmp(path, "/..") == 0) continue;
        if (strcmp(path, plan.output) == 0)
            grant(ruleset, path, change | move);
        else if (strcmp(path, "/dev") == 0)
            grant(ruleset, path, READ_DIR);
        else if (strcmp(path, "/tmp") != 0)
            grant(ruleset, path, READ);
    }
    closedir(top);
    for (size_t each = 0; each < sizeof writable / sizeof *writable; each++)
        if (access(writable[each], F_OK) == 0) grant(ruleset, writable[each], READ | change | MAKE | move);
    require(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
    require(syscall(SYS_landlock_restrict_self, ruleset, abi >= 7 ? QUIET : 0) == 0, "landlock_restrict_self");
    close(ruleset);
    if (plan.program_filter.len)
        require(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &plan.program_filter, 0, 0) == 0, "PR_SET_SECCOMP");
}

/* Fork the program's process. Returns false in it, with its descriptors in place, see program/child.py. */
static bool fork_program(void) {
    int order[2], done[2], pipes[STREAMS][2], theirs[ORDER + 1];
    require(pipe2(order, O_CLOEXEC) == 0 && pipe2(done, O_CLOEXEC) == 0, "pipe2");
    for (int each = 0; each < STREAMS; each++) require(pipe2(pipes[each], O_CLOEXEC) == 0, "pipe2");
    program.pid = fork();
    require(program.pid >= 0, "fork");
    if (program.pid == 0) {
        require(setsid() != -1, "setsid");
        const int wanted[] = {open("/dev/null", O_RDONLY | O_CLOEXEC), pipes[STDOUT][1], pipes[STDERR][1],
                              pipes[RESULT][1], done[1], order[0]};
        /* First away from 0 to 5, then into place. */
        for (int each = 0; each <= ORDER; each++)
            require((theirs[each] = fcntl(wanted[each], F_DUPFD_CLOEXEC, 64)) >= 0, "fcntl");
        for (int each = 0; each <= ORDER; each++)
            require(dup3(theirs[each], each, each > 2 ? O_CLOEXEC : 0) == each, "dup3");
        require(syscall(SYS_close_range, ORDER + 1, ~0U, 0) == 0, "close_range");
        signal(SIGCHLD, SIG_DFL);
        signal(SIGPIPE, SIG_IGN);
        /* The files below /proc/self belong to root for a process that is not dumpable. Process 1 stays so. */
        require(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0, "PR_SET_DUMPABLE");
        /* In a shortage of memory the kernel kills the program, not process 1, which has to report it. */
        put("/proc/self/oom_score_adj", "1000");
        confine();
        return false;
    }
    close(order[0]);
    close(done[1]);
    program.order = order[1];
    program.done = done[0];
    for (int each = 0; each < STREAMS; each++) {
        close(pipes[each][1]);
        relays[each].descriptor = pipes[each][0];
        /* A program can open its own end for reading, and take what we were just notified of, see pipe(7). */
        require(fcntl(relays[each].descriptor, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    }
    return true;
}

static void close_relay(int number) {
    struct relay *relay = &relays[number];
    struct stream *stream = &wire.streams[number];
    if (relay->descriptor < 0) return;
    close(relay->descriptor);
    relay->descriptor = -1;
    if (stream->open) {
        room_for(0);
        add_frame(END, stream->id, 0);
        stream->open = false;
    }
}

static uint32_t credit_for(int number) {
    return wire.streams[number].id ? wire.streams[number].credit : MOST_CREDIT;
}
static bool is_watched(int number) {
    return relays[number].descriptor >= 0 && !relays[number].over && credit_for(number) > 0;
}

/* Pass on what a pipe holds, as credit allows: loop.Relay. The stream is opened for its first bytes. */
static void pump(int number) {
    static const char opened[] = "{\"kind\":\"%s\",\"meta\":{},\"duplex\":false}";
    static uint8_t chunk[CHUNK];
    struct relay *relay = &relays[number];
    struct stream *stream = &wire.streams[number];
    const uint32_t credit = credit_for(number);
    const ssize_t got = read(relay->descriptor, chunk, credit < CHUNK ? credit : CHUNK);
    if (got < 0) return; /* the program has taken it itself */
    relay->room -= got;
    if (relay->room < 0) {
        relay->over = true; /* not closed before the program is killed */
    } else if (got == 0) {
        close_relay(number);
    } else {
        if (stream->id == 0) {
            wire.last = wire.last ? wire.last + 2 : 1;
            *stream = (struct stream){wire.last, MOST_CREDIT, true};
            int length = snprintf((char *)room_for(CHUNK), CHUNK, opened, relay->kind);
            add_frame(OPEN, stream->id, (size_t)length);
        }
        memcpy(room_for((size_t)got), chunk, (size_t)got);
        add_frame(DATA, stream->id, (size_t)got);
        stream->credit -= (uint32_t)got;
    }
}
static bool is_over(void) {
    return relays[STDOUT].over || relays[STDERR].over || relays[RESULT].over;
}

/* Wait for the next events up to a moment, and handle those of the wire and the pipes. */
static void step(int64_t until, int done) {
    struct pollfd watched[STREAMS + 3] = {{.fd = WIRE, .events = POLLIN}, {.fd = done, .events = POLLIN},
                                          {.fd = program.ended, .events = POLLIN}};
    flush();
    for (int each = 0; each < STREAMS; each++)
        watched[3 + each] = (struct pollfd){.fd = is_watched(each) ? relays[each].descriptor : -1, .events = POLLIN};
    const int64_t left = until - now();
    poll(watched, STREAMS + 3, left > 0 ? (int)((left + 999999) / 1000000) : 0);
    if (watched[0].revents) receive();
    for (int each = 0; each < STREAMS; each++) {
        if (wire.streams[each].id && !wire.streams[each].open)
            close_relay(each); /* the host has reset it */
        else if (watched[3 + each].revents && is_watched(each))
            pump(each);
    }
    struct signalfd_siginfo told;
    while (watched[2].revents && read(program.ended, &told, sizeof told) > 0) continue;
}

/* Pass on what the dead have left in the pipes, then end the streams: work._drain. */
static void drain(void) {
    const int64_t until = now() + DRAIN;
    for (bool empty = false; !empty && now() < until;) {
        empty = true;
        for (int each = 0; each < STREAMS; each++) {
            struct pollfd look = {.fd = relays[each].descriptor, .events = POLLIN};
            empty &= relays[each].over || poll(&look, 1, 0) <= 0 || !(look.revents & POLLIN);
        }
        if (!empty) step(until, -1);
    }
    for (int each = 0; each < STREAMS; each++) close_relay(each);
}

/* Wait until the program ends, reports that its task is over, or has to be stopped: work._wait. */
static void wait_for_end(struct handed *told, int64_t cpu_us) {
    int stop = NOT_STOPPED, status = 0, said = -1; /* -1 nothing yet, -2 nothing ever, else the status */
    int64_t look = now() + LOOK;
    struct rusage usage = {0};
    told->cpu_us = -1; /* it is known once all are reaped */
    uint8_t byte;
    for (;;) {
        const bool gone = wait4(program.pid, &status, WNOHANG, &usage) == program.pid;
        if (said == -1) {
            ssize_t got = read(program.done, &byte, 1);
            said = got == 1 ? byte : got == 0 ? -2 : -1;
        }
        const bool over = said >= 0 && !is_over();
        if (gone) break;
        if (over && of_one_alone(program.pid, &told->cpu_us, &told->peak_bytes)) {
            told->status = said;
            return;
        }
        if (!over) {
            stop = wire.stop ? wire.stop : now() >= told->deadline ? STOPPED_TIME : is_over() ? STOPPED_OUTPUT : 0;
            if (!stop && now() >= look) {
                stop = processor_us() > cpu_us ? STOPPED_PROCESSOR : NOT_STOPPED;
                look = now() + LOOK;
            }
        }
        if (over || stop) {
            kill(-1, SIGKILL); /* all: a process that traces this one would keep it from being reaped */
            require(wait4(program.pid, &status, 0, &usage) == program.pid, "wait4");
            break;
        }
        step(told->deadline < look ? told->deadline : look, said == -1 ? program.done : -1);
        reap_orphans(program.pid);
    }
    told->status = said >= 0 && !is_over() ? said : WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    told->stopped = stop;
    told->peak_bytes = usage.ru_maxrss * INT64_C(1024);
}

/* Pass the job on to the program's process as it came, and return what that reads of it before the program runs. */
static struct limits begin(void) {
    struct limits limits = {0};
    uint8_t header[HEADER];
    read_all(WIRE, header, sizeof header);
    const uint32_t length = get_u32(header + 5);
    require(header[0] == MESSAGE && get_u32(header + 1) == 0 && length <= MOST_JOB, "this is no job");
    /* A process that is gone is found out by its end. */
    bool reads = write(program.order, header, sizeof header) == sizeof header;
    for (uint32_t left = length, part; left; left -= part) {
        part = left < CHUNK ? left : CHUNK;
        read_all(WIRE, out.bytes, part);
        for (ssize_t at = 0, written; reads && at < part; at += written)
            reads = (written = write(program.order, out.bytes + at, part - (size_t)at)) > 0;
    }
    for (ssize_t at = 0, got; reads && at < (ssize_t)sizeof limits; at += got)
        reads = (got = read(program.done, (char *)&limits + at, sizeof limits - (size_t)at)) > 0;
    if (!reads) memset(&limits, 0, sizeof limits);
    return limits;
}

static void report(const struct handed *told) {
    static const char outcome[] =
        "{\"kind\":\"outcome\",\"body\":{\"stopped\":\"%s\",\"status\":%" PRId64 ",\"wall_ms\":%" PRId64 ".%03d,"
        "\"cpu_ms\":%" PRId64 ".%03d,\"memory_peak_bytes\":%" PRId64 ",\"skipped\":[],\"changes\":null}}";
    int length = snprintf((char *)room_for(1024), 1024, outcome, STOP_NAMES[told->stopped], told->status,
                          told->wall_us / 1000, (int)(told->wall_us % 1000), told->cpu_us / 1000,
                          (int)(told->cpu_us % 1000), told->peak_bytes);
    add_frame(MESSAGE, 0, (size_t)length);
    flush();
}

/* Fork a process that returns into the interpreter for one task. False in it; else it ended with a reason to stop. */
static bool help(struct handed *told, int role, int *stop) {
    int status = 0;
    sigset_t none;
    flush();
    const pid_t helper = fork();
    require(helper >= 0, "fork");
    if (helper == 0) {
        told->role = role;
        told->wire = WIRE;
        told->last = wire.last ? (int64_t)wire.last : -1;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        return false;
    }
    require(waitpid(helper, &status, 0) == helper, "waitpid");
    require(WIFEXITED(status) && WEXITSTATUS(status) < STOPS, "a helper failed");
    *stop = WEXITSTATUS(status);
    return true;
}

/* Do one job, and end. Returns only in processes that return into the interpreter. */
static void serve(struct handed *told) {
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGCHLD);
    if (!fork_program()) {
        told->role = PROGRAM;
        return;
    }
    /* No handler of the zygote's here. Of what is not handled the kernel drops all that comes from inside. */
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL);
    signal(SIGPIPE, SIG_IGN);
    require(sigprocmask(SIG_SETMASK, &ends, NULL) == 0, "sigprocmask");
    program.ended = signalfd(-1, &ends, SFD_CLOEXEC | SFD_NONBLOCK);
    require(program.ended >= 0, "signalfd");
    report_ready();

    const struct limits limits = told->limits = begin();
    const int64_t started = now();
    if (limits.inputs > 0 && !help(told, RECEIVE, &wire.stop)) return;
    require(fcntl(program.done, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    const int64_t ahead_us = reaped_us(), began = now(), before_us = clock_us(program.pid);
    close(program.order);
    relays[STDOUT].room = relays[STDERR].room = limits.printed_bytes;
    relays[RESULT].room = 64 << 20;
    told->deadline = started + limits.wall_us * 1000;
    wait_for_end(told, ahead_us + limits.cpu_seconds * 1000000);
    told->wall_us = (now() - began) / 1000;
    close(program.done);
    kill(-1, SIGKILL); /* as process 1 of a pid namespace: everything in it but ourselves, see kill(2) */
    const bool written = *plan.output && holds_anything(plan.output, true);
    while ((written || told->cpu_us < 0) && waitpid(-1, NULL, 0) > 0) continue;
    drain();
    const int64_t spent_us = (told->cpu_us < 0 ? reaped_us() : told->cpu_us) - ahead_us - before_us;
    told->cpu_us = spent_us > 0 ? spent_us : 0;
    if (!told->stopped && is_over()) told->stopped = STOPPED_OUTPUT;
    if (written) {
        while (wire.held) receive(); /* no part of a frame is left for the helper, which has the wire from here on */
        if (!help(told, COLLECT, &wire.stop)) return;
    } else {
        report(told);
    }
    /* The host reads what the sandbox has used before it ends it. */
    while (read(WIRE, wire.bytes, sizeof wire.bytes) > 0) continue;
    _exit(0);
}

/* ------------------------------------------------------------------ called by the zygote */
static const void *kept(const void *bytes, size_t length) {
    void *copy = malloc(length);
    require(copy != NULL, "malloc");
    return memcpy(copy, bytes, length);
}

/* Keep what forks need: lists, each ending with an empty string, and two filters, by the bytes of each. */
__attribute__((visibility("default"))) int glovebox_plan(const char *bytes, const size_t *lengths) {
    const char **lists[] = {&plan.tmpfs, &plan.hidden, &plan.masked, &plan.python, &plan.output};
    struct sock_fprog *filters[] = {&plan.filter, &plan.program_filter};
    for (size_t each = 0; each < sizeof lists / sizeof *lists; each++, bytes += *lengths++)
        *lists[each] = kept(bytes, *lengths);
    for (size_t each = 0; each < sizeof filters / sizeof *filters; each++, bytes += *lengths++) {
        filters[each]->len = (unsigned short)(*lengths / sizeof(struct sock_filter));
        filters[each]->filter = (struct sock_filter *)kept(bytes, *lengths);
    }
    return 0;
}

/* Receive an order and its descriptors: their number, or -1 when the host has closed the socket. */
static int next_order(int orders, char *order, size_t most, int *given) {
    char space[CMSG_SPACE(MOST_FDS * sizeof(int))];
    struct iovec content = {order, most - 1};
    struct msghdr message = {.msg_iov = &content, .msg_iovlen = 1, .msg_control = space};
    message.msg_controllen = sizeof space;
    ssize_t length;
    while ((length = recvmsg(orders, &message, 0)) < 0 && errno == EINTR) continue;
    if (length <= 0) return -1;
    order[length] = '\0';
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header == NULL || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) return 0;
    const size_t bytes = header->cmsg_len - CMSG_LEN(0);
    memcpy(given, CMSG_DATA(header), bytes);
    return (int)(bytes / sizeof(int));
}

/* Become the host's user of the next sandbox, where this zygote has several: zygote.become_user. */
static bool become_user(unsigned user) {
    return user == getuid() || (setresgid(user, user, user) == 0 && setresuid(user, user, user) == 0 &&
                                prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0);
}

/* Fork a sandbox for every order, until the host closes the socket: then 1. 0 in what returns into the interpreter. */
__attribute__((visibility("default"))) int glovebox_serve(int orders, struct handed *told) {
    const unsigned own = getuid();
    signal(SIGCHLD, SIG_IGN); /* forks are not waited for: the host sees their end by a pidfd */
    for (;;) {
        char order[256];
        int given[MOST_FDS];
        unsigned user = own;
        const int count = next_order(orders, order, sizeof order, given);
        if (count < 0) return 1;
        bool fits = count >= 2 && (strcmp(order, "{\"uid\": null}") == 0 || sscanf(order, "{\"uid\": %u}", &user) == 1);
        for (int each = 0; each < count; each++) fits &= given[each] > 2;
        errno = EINVAL;
        long pid = -1;
        if (fits && become_user(user)) {
            /* Without a stack of its own the child continues where the parent is. */
            pid = syscall(SYS_clone, (unsigned long)NEW_NAMESPACES | SIGCHLD, 0, 0, 0, 0);
            if (pid == 0) {
                leave(given, count, own, user);
                serve(told);
                return 0;
            }
        }
        if (pid < 0 && count >= 2) /* no more processes or namespaces, for instance: the host may ask again */
            dprintf(given[1], "clone(2): %s", strerror(errno));
        /* For no longer than the fork: no other process has this user. */
        require(become_user(own), "setresuid");
        for (int each = 0; each < count; each++) close(given[each]);
    }
}
